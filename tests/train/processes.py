"""The step as one of several processes: python -m tests.train.processes RANK COUNT PORT DELAY [gloo]; a line of numbers for each step."""

import sys
import time

STEPS = 3
WORDS = ["--mesh.dp", "2", "--mesh.ep", "4", "--batch-size", "8", "--microbatches", "1"]


def main(rank: int, count: int, port: int, delay_s: float, collectives: str) -> None:
    import jax

    from moejax.parallel.flags import set_cpu_devices

    set_cpu_devices(8 // count)
    if collectives:
        jax.config.update("jax_cpu_collectives_implementation", collectives)
    if rank:
        time.sleep(delay_s)  # a process whose compilation, or whose node, is slow
    if collectives:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)

    from moejax.config import load_config
    from moejax.data import open_data
    from moejax.parallel import make_mesh
    from moejax.train import init_state, make_train_step, put_batch

    config = load_config("tiny_cpu", WORDS)
    mesh, data = make_mesh(config.mesh), open_data(config)
    state, step = init_state(config, mesh), make_train_step(config, mesh)
    for i in range(STEPS):
        state, metrics = step(state, put_batch(data.batch(i), config, mesh))
        print("step", *(float(metrics[name]) for name in ("train/loss", "optim/grad_norm", "moe/balance_loss")), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5] if len(sys.argv) > 5 else "")
