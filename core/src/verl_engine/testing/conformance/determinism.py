"""The same seed gives the same weights, and all ranks the same results."""

import torch

from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import make_sequences


def same_seed(bench: Bench) -> None:
    """Two runs with one seed end with the same weights bit for bit, dropout included; another seed gives others."""
    first, second, other = (_run(bench, seed) for seed in (3, 3, 4))
    bench.require_same(second, first, "the second run of one seed")
    draws_none = "dropout" in bench.gaps
    bench.require(draws_none or differences(other, first) != "none", "another seed drew the same dropout")


def _run(bench: Bench, seed: int) -> dict[str, torch.Tensor]:
    driver = bench.driver("dropout", seed=seed)
    driver.train_on(0, 1, 2)
    return driver.weights()


def ranks_agree(bench: Bench) -> None:
    """Every rank reports the same step and exports the same weights."""
    driver = bench.driver()
    reports = [driver.train(make_sequences(8, seed=step)) for step in range(2)]
    everywhere = bench.gather((reports, {name: tensor.numpy() for name, tensor in driver.weights().items()}))
    first_reports, first_weights = everywhere[0]
    for rank, (others, weights) in enumerate(everywhere):
        bench.require(others == first_reports, f"rank {rank} reports {others}, rank 0 {first_reports}")
        odd = [name for name, array in first_weights.items() if not (weights[name] == array).all()]
        bench.require(not odd, f"rank {rank} and rank 0 export different values of {', '.join(odd[:5])}")


CHECKS = (
    Check("determinism/same_seed", (all_ranks(same_seed),)),
    Check("determinism/ranks_agree", (all_ranks(ranks_agree),), ("multi_rank",)),
)
