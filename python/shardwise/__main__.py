"""python -m shardwise doctor: what works here, and what to do about the rest."""

from __future__ import annotations

import argparse
import sys

from shardwise import doctor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise", description="Tools of shardwise.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "prints versions, back ends, devices, and what works here; exit code 0 when shardwise is usable, else 1"
    command = commands.add_parser("doctor", help=about, description=f"Doctor: {about}.")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args()
    report = doctor.examine()
    print(report.json() if arguments.json else report.text())
    return 0 if report.usable else 1


if __name__ == "__main__":
    sys.exit(main())
