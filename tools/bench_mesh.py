"""Times one training step on several meshes of eight devices in one interleaved run, a JSON line for each.

    python tools/bench_mesh.py                                    # 2 stages x 4 expert ranks beside 2 replicas x 4 expert ranks
    python tools/bench_mesh.py pp4_ep2 dp4_ep2 pp2_ep4_v2 --microbatches 8

A mesh is written as axes and sizes: pp2_dp2_ep2; v2 are two stages on a rank. Width 256, 4 layers, 16 experts, top-4, float32
(moejax/train/bench.py). `ratio` is the time beside that of the last mesh; `beyond_bubble` is what is left of it without the share in which
the schedule's ranks wait.
"""

import argparse
import dataclasses
import json
import re

import jax

from moejax.config import MeshConfig, TrainConfig
from moejax.errors import ConfigError
from moejax.parallel.flags import set_cpu_devices


def mesh_of(word: str) -> MeshConfig:
    """The mesh that a word such as pp2_ep4_v2 names."""
    if not re.fullmatch(r"(pp|dp|ep|v)\d+(_(pp|dp|ep|v)\d+)*", word):
        raise ConfigError(f"mesh {word} is not made of pp, dp, ep and v with a number each; write it as in pp2_ep4")
    size = {name: int(number) for name, number in re.findall(r"([a-z]+)(\d+)", word)}
    return MeshConfig(pp=size.get("pp", 1), dp=size.get("dp", 1), ep=size.get("ep", 1), virtual_stages=size.get("v", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("meshes", nargs="*", default=["pp2_ep4", "dp2_ep4"], help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of a microbatch over all devices (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, of which the median counts (default: %(default)s)")
    args = parser.parse_args()
    set_cpu_devices(8)
    from moejax.parallel.pipeline import schedule_of
    from moejax.train.bench import bench_config, time_steps

    jax.config.update("jax_enable_compilation_cache", False)
    batch = args.microbatches * args.sequences
    base = bench_config(experts=16, dtype="float32", batch=batch, seq=args.seq, vocab=2048)
    try:
        configs: dict[str, TrainConfig] = {
            word: dataclasses.replace(base, microbatches=args.microbatches, mesh=mesh_of(word)) for word in args.meshes
        }
        seconds = time_steps(configs, repeats=args.steps)
    except ConfigError as refusal:
        parser.error(str(refusal))
    for word, config in configs.items():
        ratio, bubble = seconds[word] / seconds[args.meshes[-1]], schedule_of(config).bubble()
        line = {"mesh": word, "microbatches": args.microbatches, "step_s": seconds[word], "ratio": ratio, "bubble": bubble}
        line |= {"beyond_bubble": ratio * (1 - bubble)}
        print(json.dumps({key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in line.items()}), flush=True)


if __name__ == "__main__":
    main()
