#!/usr/bin/env bash
# Runs the tests marked slow, which scripts/test.sh leaves out; extra arguments go to pytest.
exec bash "$(dirname "$0")/test.sh" -m slow "$@"
