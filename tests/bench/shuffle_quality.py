"""How random an order by blocks is, beside a full shuffle: 10,000 samples, chunks of several steps.

    python tests/bench/shuffle_quality.py

Of one epoch's order, medians of ``--epochs``: how far samples lie from their place in stored order, as a share of all
(mean, and what the tenth that moves least does not reach); the correlation of samples that follow each other; of how
many chunks the 32 samples of a batch are; and how often a rank decodes each chunk, if it keeps ``window`` of them (of a
full shuffle: 8; of pairs of steps, three times as many).
"""

import argparse
import statistics

import numpy as np

from scidata.core.cache import Cache
from scidata.data.order import Order


def order(blocks, window, epoch, chunks):
    lanes = {} if window is None else {"blocks": blocks, "stretches": blocks // chunks, "lanes": window}
    return Order(num_samples=len(blocks), shuffle=True, seed=0, **lanes).entries(epoch)


def quality(entries, blocks, room, reach):
    num = len(entries)
    moved = np.abs(entries - np.arange(num)) / num
    of_batches = [len(set(blocks[entries[i : i + 32]].tolist())) for i in range(0, num - 31, 32)]
    kept, loads = Cache(room, "lru"), 0
    for entry in entries.tolist():
        for block in {int(blocks[entry]), int(blocks[min(entry + reach, num - 1)])}:
            if kept.get(block) is None:
                kept.put(block, True)
                loads += 1
    return (
        moved.mean(),
        np.quantile(moved, 0.1),
        np.corrcoef(entries[:-1], entries[1:])[0, 1],
        statistics.mean(of_batches),
        loads / (blocks.max() + 1),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 40])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    print("| steps a chunk | order | moved, mean | moved, least tenth | neighbours | chunks a batch of 32 | decoded |")
    print("|---|---|---|---|---|---|---|")
    for steps in args.steps:
        blocks = np.arange(args.num) // steps
        cases = [(window, 1, 0) for window in [*args.windows, None]] + [(8, 10, 1)]
        for window, chunks, reach in cases:
            orders = [order(blocks, window, e, chunks) for e in range(args.epochs)]
            found = [quality(entries, blocks, (window or 8) * (1 + 2 * reach), reach) for entries in orders]
            mean, least, near, mixed, loads = map(statistics.median, zip(*found, strict=True))
            name = "full shuffle" if window is None else f"blocks, window={window}" + ", pairs of steps" * reach
            print(f"| {steps} | {name} | {mean:.3f} | {least:.3f} | {near:+.3f} | {mixed:.1f} | {loads:.1f} times |")


if __name__ == "__main__":
    main()
