"""Times the whole training step beside the machine's dense products and copies, one JSON line for each number of experts.

    python tools/bench_step.py                                    # 16, 64 and 128 experts, float32, 4 x 128 tokens
    python tools/bench_step.py --experts 16 --steps 30

Width 256, 4 layers, 8 heads of 32, top-4 of experts of width 256, AdamW: see moejax/train/bench.py. `gemm_share` is the rate of
useful FLOPs over the measured rate of a dense product; `weight_traffic_s` is what weights and optimizer have to move at the measured copy
rate, which is all that a step may cost more with more experts.
"""

import argparse
import json

import jax

from moejax.errors import ConfigError
from moejax.parallel.host_memory import keep_freed_memory
from moejax.train.bench import bench_config, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 64, 128], help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=15, help="timed steps, of which the median counts (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=2048, help="default: %(default)s")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps} is below 1")
    configs = []
    for experts in args.experts:
        try:
            configs.append(bench_config(experts=experts, dtype=args.dtype, batch=args.batch, seq=args.seq, vocab=args.vocab))
        except ConfigError as refusal:
            parser.error(str(refusal))
    jax.config.update("jax_enable_compilation_cache", False)
    keep_freed_memory()
    for config in configs:
        line = measure(config, repeats=args.steps)
        print(json.dumps({key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in line.items()}), flush=True)


if __name__ == "__main__":
    main()
