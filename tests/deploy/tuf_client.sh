#!/bin/sh
# The command that tuf-conformance calls: tests/deploy/tuf_client.py by this repository's own Python.
root=$(dirname "$0")/../..
PYTHONPATH="$root" exec "$root/.venv/bin/python" -m tests.deploy.tuf_client "$@"
