#!/bin/sh
# Chooses a Python and lets it run prepare.py, which sets up the rest.
# usage: scripts/prepare.sh build|test|lint|docs [PYTHON]
# First hit wins: the PYTHON given; the active one (of VIRTUAL_ENV, else python3) if it has a supported torch; .venv;
# the first complete one of python3 and python3.15 to python3.10; the first suitable one of these.
set -eu
scripts=$(cd "$(dirname "$0")" && pwd)
level=$1
given=${2:-}

probe() {
  "$1" "$scripts/probe_python.py" 2>/dev/null || true
}

is() { # is WORD PYTHON
  case " $(probe "$2") " in
    *" $1 "*) return 0 ;;
    *) return 1 ;;
  esac
}

choose() {
  active=python3
  if [ -n "${VIRTUAL_ENV:-}" ]; then active=$VIRTUAL_ENV/bin/python; fi
  if is torch "$active"; then echo "$active" && return; fi
  if is suitable "$scripts/../.venv/bin/python"; then echo "$scripts/../.venv/bin/python" && return; fi
  for word in complete suitable; do
    for candidate in "$active" python3 python3.15 python3.14 python3.13 python3.12 python3.11 python3.10; do
      if is "$word" "$candidate"; then echo "$candidate" && return; fi
    done
  done
}

if [ -n "$given" ]; then
  version=$(probe "$given")
  if [ -z "$version" ]; then
    echo "shardwise: PYTHON=$given is no Python that runs, or a very old one; give a Python 3.10 or newer." >&2
    exit 1
  elif ! is suitable "$given"; then
    echo "shardwise: PYTHON=$given is Python $version; give a Python 3.10 or newer, not free-threaded." >&2
    exit 1
  fi
  python=$given
else
  python=$(choose)
  if [ -z "$python" ]; then
    echo "shardwise: no Python 3.10 or newer found as python3 or python3.X." \
      "Install one (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev), or name one: PYTHON=..." >&2
    exit 1
  fi
fi
exec "$python" "$scripts/prepare.py" "$level"
