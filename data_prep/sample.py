"""`python -m data_prep sample DIR`: real text out of a published package, no data hub needed.

    DIR/enwiki.xml.bz2   a piece of the English Wikipedia's pages-articles dump (kind: wikipedia)
    DIR/news/*.txt       300 news articles, one a file                          (kind: text)

Both are test data of the gensim package (LGPL; Wikipedia text CC BY-SA, articles of the Lee
corpus). Only the archive is downloaded and read: nothing of it is installed or run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from configs import UserError, make_folder, say

PACKAGE = "gensim==4.4.0"
# Any build holds the same data; naming one makes this work on every machine and Python version.
BUILD = [
    "--python-version=311",
    "--implementation=cp",
    "--abi=cp311",
    "--platform=manylinux_2_28_x86_64",
]
DATA = "gensim/test/test_data/"
DUMP = DATA + "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
NEWS = DATA + "lee_background.cor"
TIMEOUT_S = 300


def main(argv: list[str]) -> int | None:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="where to put the text")
    parser.add_argument("--archive", help=f"a wheel of {PACKAGE} that is already on this machine")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.folder)
    dump, news = folder / "enwiki.xml.bz2", folder / "news"
    if dump.is_file() and news.is_dir():
        say(f"{folder} already holds the sample text")
        return None
    made = make_folder(folder, "choose another DIR")
    with tempfile.TemporaryDirectory(dir=made, prefix=".download-") as temporary:
        archive = Path(arguments.archive) if arguments.archive else download(Path(temporary))
        extract(archive, Path(temporary), dump, news)
    say(f"made {dump} ({dump.stat().st_size / 1e6:.1f} MB, kind: wikipedia)")
    say(f"made {news} ({len(list(news.glob('*.txt')))} documents, kind: text)")
    return None


def download(folder: Path) -> Path:
    """The package's archive, fetched by pip with whatever index it is set up for.

    Raises:
        UserError: no pip, no network, no such package; with pip's own last lines.
    """
    say(f"downloading {PACKAGE} (28 MB; it is read, not installed)")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *BUILD,
        "--quiet", "--disable-pip-version-check", "--no-input", "--retries=3", "--timeout=20",
        PACKAGE, "-d", str(folder),
    ]  # fmt: skip
    remedy = (
        "check the network and pip's index; or fetch the wheel elsewhere and give --archive WHEEL"
    )
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"downloading {PACKAGE} took more than {TIMEOUT_S} s", remedy) from None
    found = list(folder.glob("*.whl"))
    if result.returncode or not found:
        lines = [x for x in result.stderr.splitlines() if "WARNING" not in x] or [
            "pip said nothing"
        ]
        raise UserError(f"downloading {PACKAGE} failed: " + "\n  ".join(lines[-3:]), remedy)
    return found[0]


def extract(archive: Path, temporary: Path, dump: Path, news: Path) -> None:
    """Puts the text in place by rename, so that a stopped run leaves no half of it."""
    try:
        with zipfile.ZipFile(archive) as wheel:
            (temporary / dump.name).write_bytes(wheel.read(DUMP))
            articles = wheel.read(NEWS).decode("utf-8").splitlines()
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, UnicodeError) as error:
        raise UserError(
            f"{archive}: not a wheel of {PACKAGE}: {error}", "download it again"
        ) from None
    (temporary / "news").mkdir()
    for number, text in enumerate(articles):
        if text.strip():
            (temporary / "news" / f"{number:03d}.txt").write_text(text.strip() + "\n", "utf-8")
    (temporary / dump.name).replace(dump)
    if not news.is_dir():
        (temporary / "news").replace(news)
