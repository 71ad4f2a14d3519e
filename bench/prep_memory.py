"""Memory of a build: peak resident size of each worker on a corpus of any size.

    python -m bench.prep_memory --gb 2 --workers 2

The corpus is the books of LAMBERT_DATA over and over, every copy with words of its own (a share of
the words gets a suffix that no other copy has), as one large text file with a blank line between
documents' paragraphs and as many small ones. Prints one line for a table and, with --json, a
JSON line last.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench.data import data_folder

DATA = data_folder()
GIB = 1 << 30


def write_corpus(folder: Path, size: int) -> int:
    """Text files of about `size` bytes in all; the first holds half of it. Returns the bytes."""
    folder.mkdir(parents=True)
    books = sorted((DATA / "books").glob("*.txt.gz"))
    if not books:
        sys.exit(f"no books at {DATA / 'books'}; set LAMBERT_DATA")
    texts = [gzip.decompress(book.read_bytes()).decode() for book in books]
    draw = random.Random(0)
    written, number = 0, 0
    large = (folder / "large.txt").open("wb")
    while written < size:
        text = texts[number % len(texts)]
        words = set(draw.sample(sorted(set(re.findall(r"[a-z]{5,}", text))), 200))
        data = change(text, words, f"{number // len(texts):x}").encode()
        if written < size // 2:
            large.write(data + b"\n\n")
        else:
            (folder / f"{number:06d}.txt").write_bytes(data)
        written += len(data)
        number += 1
    large.close()
    return written


def change(text: str, words: set[str], mark: str) -> str:
    """The text with `mark` behind each of these words."""
    return re.sub(r"[a-z]{5,}", lambda m: m[0] + mark if m[0] in words else m[0], text)


def resident(pid: int) -> tuple[int, int]:
    """(peak resident bytes, resident bytes that are not file pages) of a process; 0 when gone."""
    peak = anonymous = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                peak = int(line.split()[1]) << 10
            elif line.startswith("RssAnon"):
                anonymous = int(line.split()[1]) << 10
    except OSError:
        pass
    return peak, anonymous


def family(pid: int) -> list[int]:
    """A process and what it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(p for child in children for p in family(int(child)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the corpus in 10^9 bytes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", default="runs/prep-memory", help="emptied before and after")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    work = Path(arguments.work)
    shutil.rmtree(work, ignore_errors=True)
    size = write_corpus(work / "text", int(arguments.gb * 1e9))
    recipe = work / "recipe.yaml"
    recipe.write_text(
        f"name: memory\nwork_dir: {work}/run\nphases: []\n"
        f"sources: [{{kind: text, path: {work}/text, document: window}}]\n"
        f"vocab: {{file: {DATA}/vocab/bert-base-uncased/vocab.txt}}\n"
        f"prep: {{workers: {arguments.workers}}}\nshards: {{len128: {{max_length: 128}}}}\n"
    )
    room = [sys.executable, "-m", "data_prep"]
    subprocess.run([*room, "vocab", str(recipe)], check=True, stdout=subprocess.DEVNULL)
    start = time.monotonic()
    build = subprocess.Popen([*room, "build", str(recipe)])
    peaks: dict[int, int] = {}
    anonymous: dict[int, int] = {}
    while build.poll() is None:
        for pid in family(build.pid):
            peak, own = resident(pid)
            peaks[pid] = max(peaks.get(pid, 0), peak)
            anonymous[pid] = max(anonymous.get(pid, 0), own)
        time.sleep(0.2)
    wall = time.monotonic() - start
    if build.returncode:
        sys.exit(build.returncode)
    parent, workers = build.pid, [p for p in peaks if p != build.pid and peaks[p] > 60 << 20]
    result = {
        "corpus_gb": round(size / 1e9, 3),
        "workers": arguments.workers,
        "worker_peak_gib": round(max((peaks[p] for p in workers), default=0) / GIB, 3),
        "worker_anonymous_gib": round(max((anonymous[p] for p in workers), default=0) / GIB, 3),
        "parent_peak_gib": round(peaks[parent] / GIB, 3),
        "wall_s": round(wall, 1),
    }
    print("| " + " | ".join(f"{k} {v}" for k, v in result.items()) + " |")
    if arguments.json:
        print(json.dumps(result))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
