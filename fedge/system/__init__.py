"""Access to the machine: files that survive a power cut, child processes, services, logs.

Every other package uses this one, which uses none of them. `files` writes durably, `child` runs work in another
process, `logs` writes log lines, `help` and `text` are for people. Begin with `files`.
"""
