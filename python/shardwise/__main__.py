"""Tools: python -m shardwise doctor, demo, estimate, timeline and checkpoint."""

from __future__ import annotations

import argparse
import sys

from shardwise import _checkpoint_command, _demo_command, _doctor, _estimate_command, _timeline_command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise", description="Tools of shardwise.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "prints versions, back ends, devices, and what works here; exit code 0 when shardwise is usable, else 1"
    command = commands.add_parser("doctor", help=about, description=f"Doctor: {about}.")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=run_doctor)
    tools = {
        "demo": _demo_command,
        "estimate": _estimate_command,
        "timeline": _timeline_command,
        "checkpoint": _checkpoint_command,
    }
    for name, tool in tools.items():
        command = commands.add_parser(name, help=tool.ABOUT, description=f"{name.title()}: {tool.ABOUT}.")
        tool.add_arguments(command)
        command.set_defaults(run=tool.run)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


def run_doctor(arguments: argparse.Namespace) -> int:
    report = _doctor.examine()
    print(report.json() if arguments.json else report.text())
    return 0 if report.usable else 1


if __name__ == "__main__":
    sys.exit(main())
