"""Measures how fast a mirror uploads a checkpoint, beside plain parallel multi-part puts of the same bytes, by turns.

    AWS_ENDPOINT_URL=... python benchmarks/store_uploads.py --url s3://bucket/benchmark --megabytes 512 --turns 5

Both use the same library with the same size of parts, to the same store; the mirror also lists what is there, uploads
the run's files, and puts the manifest last. `--ranks 4` shares the mirror's upload between that many processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from onstep.checkpoint import FileStore, Manifest, Retention, SaveTransaction
from onstep.checkpoint.storage.manifest import ComponentEntry
from onstep.mirror.attach import Place, attach
from onstep.mirror.beat import Beat
from onstep.mirror.mirror import BEAT, SHARED
from onstep.mirror.shared_uploads import Helper
from onstep.stores.bucket import PART_BYTES
from onstep.stores.parallel import CONCURRENCY


def main() -> None:
    """Print seconds and MB/s of both, and the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a place in a store for this measurement alone")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given)


def measure(folder: Path, given: argparse.Namespace) -> None:
    """Upload by turns, each time other bytes."""
    place = Place(f"{given.url}/run-{os.getpid()}", folder / "run", folder / "mirrored", 60.0)
    mirror = attach(place, Retention(most_recent_k=1))
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    context = multiprocessing.get_context("spawn")
    helpers = [context.Process(target=help_out, args=(place,), daemon=True) for _ in range(1, given.ranks)]
    for helper in helpers:
        helper.start()
    plain, mirrored = [], []
    for turn in range(1, given.turns + 1):
        directory = write(folder / "run" / "checkpoints", turn, given)
        plain.append(timed(lambda directory=directory, turn=turn: put_plainly(given.url, directory, turn)))
        mirrored.append(timed(mirror.sync))
        print(f"turn {turn}: plain {plain[-1]:.2f} s, mirror {mirrored[-1]:.2f} s", flush=True)
    mirror.abandon()
    mirror.lease.release()
    for helper in helpers:
        helper.terminate()
    fast, slow = statistics.median(plain), statistics.median(mirrored)
    print(
        f"median of {given.turns}: plain {given.megabytes / fast:.0f} MB/s, mirror {given.megabytes / slow:.0f} MB/s, "
        f"ratio {fast / slow:.2f}"
    )


def help_out(place: Place) -> None:
    """Be another rank."""
    Helper(place.url, place.workplace / SHARED, Beat(place.workplace / BEAT))
    time.sleep(86_400)


def write(root: Path, step: int, given: argparse.Namespace) -> Path:
    """A checkpoint of random bytes."""
    store, transaction = FileStore(), SaveTransaction(FileStore(), root, step)
    transaction.prepare()
    store.make_dir(transaction.directory / "model")
    size = given.megabytes * 1024**2 // given.files
    digests = {}
    for number in range(given.files):
        name = f"model/rank_{number}.safetensors"
        digests[name] = store.write_file(transaction.directory / name, os.urandom(size))
    component = ComponentEntry("per_rank", list(range(given.files)), list(digests), size * given.files)
    manifest = Manifest(step, "benchmark", "2026-01-01T00:00:00", given.files, {"model": component}, digests)
    return transaction.commit(manifest)


def put_plainly(url: str, directory: Path, turn: int) -> None:
    """The same files by the library alone."""
    import obstore  # type: ignore[import-not-found, unused-ignore]
    from obstore.store import from_url  # type: ignore[import-not-found, unused-ignore]

    store = from_url(url)
    files = sorted((directory / "model").iterdir())

    def put(path: Path) -> None:
        obstore.put(store, f"plain/{turn}/{path.name}", path, chunk_size=PART_BYTES, max_concurrency=CONCURRENCY)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(put, files))


def timed(work: object) -> float:
    """Seconds that it took."""
    start = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
