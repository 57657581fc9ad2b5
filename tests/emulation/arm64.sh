#!/usr/bin/env bash
# A 64-bit Arm board on a PC: Debian's arm64 packages and PyPI's aarch64 wheels under QEMU's emulation of the processor.
#
#     tests/emulation/arm64.sh                          the torch-free tests, as on each board of $BOARDS
#     tests/emulation/arm64.sh bookworm COMMAND...      any command there; the clone is at /fedge, venvs are in /opt
#     QEMU_CPU=cortex-a76 tests/emulation/arm64.sh trixie /opt/deploy/bin/fedge infer ...
#
# Debian 12 or 13 on x86-64, as root. How long it takes and what it showed: docs/devices.md; $CACHE then holds 1.6 GB.
# QEMU raises "illegal instruction" where the chosen processor would, so wheels that are built for newer ones crash here
# as on the board. Speed, temperature and the real cpuinfo are not those of a board.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
CACHE=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fedge-arm64}
MIRROR=${MIRROR:-http://deb.debian.org/debian}
BOARDS=${BOARDS:-"bookworm:cortex-a53 bookworm:cortex-a72 trixie:cortex-a72 trixie:cortex-a76"} # Pi 3, Pi 4, Pi 4, Pi 5

declare -A part=([cortex-a53]=0xd03 [cortex-a57]=0xd07 [cortex-a72]=0xd08 [cortex-a76]=0xd0b)

# Debian's arm64 root: Python 3.11 (bookworm, as Raspberry Pi OS 12) or 3.13 (trixie, as Raspberry Pi OS 13).
make_root() {
    local root=$CACHE/$1 package program
    [ -e "$root/.complete" ] && return
    echo "unpacking Debian $1 for arm64 in $root"
    rm -rf "$root" && mkdir -p "$CACHE"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,python3-venv,libgomp1 \
        "$1" "$root" "$MIRROR" >"$CACHE/$1.log" || { tail "$CACHE/$1.log" >&2 && return 1; }
    for package in "$root"/var/cache/apt/archives/*.deb; do # instead of the second stage, which would run for minutes
        dpkg-deb --fsys-tarfile "$package" | tar -C "$root" -x --keep-directory-symlink && rm "$package"
    done
    for file in passwd group; do
        cp "$root/usr/share/base-passwd/$file.master" "$root/etc/$file"
    done
    rm -rf "$root/proc" # debootstrap makes it a link where it may not mount
    mkdir -p "$root"/{proc,sys,dev,fedge,board/cpu,board/bin}
    cp "$(command -v qemu-aarch64-static)" "$root/board/qemu"
    cp "$(dpkg -L busybox-static | grep 'bin/busybox$')" "$root/board/busybox"
    # The kernel cannot start Arm programs, so each becomes a script that starts QEMU and keeps the name it was called by.
    for program in "$root"/usr/bin/* "$root"/usr/sbin/*; do
        if [ ! -L "$program" ] && [ "$(head -c 4 "$program" | tr -d '\0')" = $'\x7fELF' ]; then
            mv "$program" "$root/board/bin/"
            printf '#!/board/busybox sh\nexec /board/qemu -0 "$0" /board/bin/%s "$@"\n' "${program##*/}" >"$program"
            chmod 755 "$program"
        fi
    done
    echo 0 | tee "$root/board/cpu/"{possible,present,online} >/dev/null # ONNX Runtime crashes on those of the PC
    touch "$root/.complete"
}

# run_in RELEASE COMMAND...: as root of the board, with this machine's network.
run_in() {
    local root=$CACHE/$1 cpu=${QEMU_CPU:-cortex-a72}
    shift
    printf 'processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\nCPU architecture: 8\n' >"$root/board/cpuinfo"
    printf 'CPU variant\t: 0x0\nCPU part\t: %s\nCPU revision\t: 3\n' "${part[$cpu]}" >>"$root/board/cpuinfo"
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    mkdir -p "$root/etc/ssl/certs" && cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    # shellcheck disable=SC2016  # expanded in the namespace
    unshare --mount bash -ceu '
        root=$1 repository=$2 cpu=$3 && shift 3
        mount --rbind /proc "$root/proc" && mount --rbind /dev "$root/dev" && mount --bind "$repository" "$root/fedge"
        mount --bind "$root/board/cpuinfo" "$root/proc/cpuinfo"
        mount -t tmpfs none "$root/sys" && mkdir -p "$root/sys/devices/system/cpu"
        cp "$root"/board/cpu/* "$root/sys/devices/system/cpu/"
        exec env -i QEMU_CPU="$cpu" HOME=/root LANG=C.UTF-8 PATH=/usr/bin:/usr/sbin:/bin:/sbin OMP_NUM_THREADS=1 \
            PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
            chroot "$root" "$@"
    ' bash "$root" "$repository" "$cpu" "$@"
}

# What docs/install.md says for a device that only predicts, and for one that serves, in a fresh copy of this clone.
install() {
    local root=$CACHE/$1
    rm -rf "$root/srv/fedge" && mkdir -p "$root/srv/fedge"
    (cd "$repository" && git ls-files -co --exclude-standard -z | tar --null -T - -c) | tar -C "$root/srv/fedge" -x
    run_in "$1" sh -ceu '
        cd /srv/fedge
        for extra in deploy serve; do
            [ -x /opt/$extra/bin/pip ] || python3 -m venv /opt/$extra
            /opt/$extra/bin/pip install --quiet -c constraints.txt ".[$extra]" pytest pytest-asyncio pytest-timeout hypothesis
        done
        rm -rf /srv/away && mkdir -p /srv/away/tests
        cp -r tests/deploy /srv/away/tests && cp pyproject.toml /srv/away'
}

# As in .ci/run: the wheel with its deploy extra, away from the sources, then with its serve extra; and what
# bundles from a PC give.
test_board() {
    QEMU_CPU=$2 run_in "$1" sh -ceu '
        cd /srv/away
        /opt/deploy/bin/python - <<END
import platform, numpy as np, onnxruntime, deploy
print(f"{platform.machine()}, Python {platform.python_version()}, ONNX Runtime {onnxruntime.__version__}:")
for folder, engine, name in [("", "fused", ""), *(("engines/", e, f"{e}_") for e in deploy.inference.engines.ENGINES)]:
    with np.load(f"tests/deploy/golden/{folder}expected.npz") as golden:
        found = deploy.load(f"tests/deploy/golden/{folder}bundle", engine=engine).predict(golden["x"])
        worst = abs(found.probabilities - golden[f"{name}probabilities"]).max()
    print(f"golden/{folder}bundle, {engine}: probabilities differ from those of the PC by at most {worst:.1e}")
END
        test="-m pytest --rootdir=. -c pyproject.toml -o pythonpath= -o timeout=900 -m torch_free"
        /opt/deploy/bin/python $test
        /opt/serve/bin/python $test tests/deploy/commands/test_serve.py tests/deploy/serving'
}

for needed in debootstrap qemu-aarch64-static dpkg-deb unshare; do
    command -v "$needed" >/dev/null || { echo "apt install debootstrap qemu-user-static busybox-static" >&2 && exit 2; }
done
dpkg -L busybox-static >/dev/null 2>&1 || { echo "apt install busybox-static" >&2 && exit 2; }

if [ $# -gt 0 ]; then
    make_root "$1"
    run_in "$@"
    exit
fi
summary=() failed=0
for board in $BOARDS; do
    make_root "${board%:*}"
done
for release in $(printf '%s\n' $BOARDS | cut -d: -f1 | uniq); do
    install "$release"
done
for board in $BOARDS; do
    echo "--- ${board%:*} on ${board#*:}"
    if test_board "${board%:*}" "${board#*:}"; then
        summary+=("$board passed")
    else
        summary+=("$board FAILED") failed=1
    fi
done
printf '%s\n' "--- summary" "${summary[@]}"
exit $failed
