"""Makes the site in build/docs: the pages with Zensical, the references with Doxygen (C++) and pdoc (Python).

Fails if a public C++ name has no comment, or if a link in the site is broken.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import check_docs

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "docs"
PAGES = ROOT / "build" / "pages"
HEADERS = ROOT / "csrc" / "include" / "shardwise"
WARNINGS = OUT / "doxygen.log"
PYTHON_MODULES = ("shardwise", "shardwise.testing")
# Options made by torch's macro are shown as the members that they stand for.
DOXYGEN = {
    "PROJECT_NAME": "shardwise for C++",
    "PROJECT_NUMBER": (ROOT / "VERSION").read_text().strip(),
    "OUTPUT_DIRECTORY": str(OUT),
    "HTML_OUTPUT": "cpp",
    "GENERATE_LATEX": "NO",
    "INPUT": str(HEADERS),
    "EXCLUDE_PATTERNS": "*/detail/*",
    "EXCLUDE_SYMBOLS": "shardwise::detail shardwise::detail::* shardwise::engine shardwise::engine::* torch torch::*",
    "STRIP_FROM_PATH": str(HEADERS.parent),
    "JAVADOC_AUTOBRIEF": "YES",
    "EXTRACT_ALL": "NO",
    "MACRO_EXPANSION": "YES",
    "EXPAND_ONLY_PREDEF": "YES",
    "PREDEFINED": '"SHARDWISE_API=" "TORCH_ARG(T,name)=T name"',
    "SORT_MEMBER_DOCS": "NO",
    "DISTRIBUTE_GROUP_DOC": "YES",
    "HAVE_DOT": "NO",
    "QUIET": "YES",
    "WARN_LOGFILE": str(WARNINGS),
    "WARN_FORMAT": '"$file:$line: $text"',
}


class Links(HTMLParser):
    """The links on a page, and the places in it that others may link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        self.targets += [values[name] for name in ("href", "src") if name in values]
        self.places |= {values[name] for name in ("id", "name") if name in values}


def link_inherited(page: Path) -> None:
    """Lets links to inherited members, which are shown with the class that has them, lead there."""
    text = page.read_text()
    places = Links(text).places

    def place_of(link: re.Match[str]) -> str:
        elsewhere = sorted(place for place in places if place.partition(".")[2] == link[2])
        return link[0] if f"{link[1]}.{link[2]}" in places or not elsewhere else f'href="#{elsewhere[0]}"'

    page.write_text(re.sub(r'href="#(\w+)\.(\w+)"', place_of, text))


def link_problems(folder: Path) -> Iterator[str]:
    """Broken links between the pages below `folder`."""
    pages = {path: Links(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    for page, links in pages.items():
        for target in dict.fromkeys(links.targets):
            if re.match(r"[a-z]+:|//", target):
                continue
            name, _, place = unquote(target).partition("#")
            linked = (page.parent / name).resolve() if name else page
            if not linked.exists():
                yield f"{page.relative_to(folder)} links to {target}, which is not there"
            elif place and linked in pages and place not in pages[linked].places:
                yield f"{page.relative_to(folder)} links to {target}, where there is no such place"


def undocumented(log: str) -> list[str]:
    """The public names that Doxygen found no comment for."""
    members = re.findall(r"Member (.+?) \(\w+\) of \w+ (?:shardwise::)?(\S+) is not documented", log)
    compounds = re.findall(r"Compound (?:shardwise::)?(\S+) is not documented", log)
    return [
        *compounds,
        *dict.fromkeys(f"{whose}::{name.partition('(')[0]}".removeprefix("shardwise::") for name, whose in members),
    ]


def other_warnings(log: str) -> list[str]:
    return [line for line in log.splitlines() if "warning" in line and "is not documented" not in line]


def linked_files(page: Path) -> Iterator[Path]:
    """What a page links to or shows in this repository, other than pages; the files of a folder that it links to."""
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
        linked = (page.parent / target).resolve()
        yield from filter(Path.is_file, linked.iterdir() if linked.is_dir() else [linked])


def make_pages() -> None:
    """Copies the pages, and what they link to, to build/pages; a link to a folder becomes one to its first file."""
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = [page for page in check_docs.pages() if page.relative_to(ROOT).parts[0] != ".github"]
    for source in {*pages, *(file for page in pages for file in linked_files(page))}:
        copy = PAGES / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    for page in pages:
        text = re.sub(r"(?<=\]\()[^)\s#:]+(?=\))", functools.partial(to_file, page.parent), page.read_text())
        (PAGES / page.relative_to(ROOT)).write_text(text)
    config = shutil.copy(Path(__file__).parent / "site.yml", ROOT / "build")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", config], check=True)
    (OUT / "404.html").unlink()  # Its links are right only on a server that has the site at its root.


def to_file(folder: Path, link: re.Match[str]) -> str:
    """The link, or that of a folder's first file."""
    linked = folder / link[0]
    return f"{link[0]}/{min(file.name for file in linked.iterdir() if file.is_file())}" if linked.is_dir() else link[0]


def make_cpp() -> None:
    settings = "".join(f"{name} = {value}\n" for name, value in DOXYGEN.items())
    subprocess.run(["doxygen", "-"], input=settings, text=True, check=True, cwd=ROOT)


def make_python() -> None:
    command = [sys.executable, "-m", "pdoc", "--no-show-source", "-o", str(OUT / "python"), *PYTHON_MODULES]
    subprocess.run(command, check=True, cwd=ROOT)
    for page in (OUT / "python").rglob("*.html"):
        link_inherited(page)


def main() -> int:
    make_pages()
    make_cpp()
    make_python()
    log = WARNINGS.read_text()
    without_comment = [f"shardwise::{name} has no comment" for name in undocumented(log)]
    problems = [*without_comment, *other_warnings(log), *link_problems(OUT)]
    print("\n".join(problems or [f"docs: the site is in {(OUT / 'index.html').relative_to(ROOT)}"]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
