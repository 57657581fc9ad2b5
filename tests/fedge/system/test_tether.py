import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from fedge.system import tether


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(
            """
            import signal, subprocess, sys
            from pathlib import Path
            from fedge.system.child import make_tethered_command
            sleeper = [sys.executable, "-c", "print('up', flush=True); import signal; signal.pause()"]
            child = subprocess.Popen(make_tethered_command(*sleeper), stdout=subprocess.PIPE, start_new_session=True)
            child.stdout.readline()
            print(child.pid, flush=True)
            signal.pause()
            """
        )
    )
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, cwd=Path.cwd()) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        os.kill(process.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs([child], timeout=300)
    assert gone
    assert not alive


def test_a_tether_whose_parent_is_already_gone_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    not_our_parent = "1" if os.getpid() != 1 else "2"
    command = [sys.executable, "-c", f"open({str(marker)!r}, 'w')"]
    assert subprocess.run([sys.executable, tether.__file__, not_our_parent, *command], check=False).returncode == 1
    assert not marker.exists()
