"""Train the small DeepSeek-V3 model that ships with SPLASH for JAX, on CPU, within a time budget.

The schedule follows elapsed training time, so the same command finishes on time on a slow or shared machine.
An interrupted run continues from the last checkpoint in --work. Needs flax, optax, tokenizers, safetensors
and tqdm.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers
from small_model.data import ASSISTANT, BOS, EOS, USER, Dataset, batches, prepare
from small_model.export import export, model_card
from small_model.model import DeepseekV3, ModelConfig, loss_and_load, update_expert_biases
from tqdm import tqdm

PHASES = ((0.35, 128), (0.62, 256), (0.78, 512), (1.0, 2048))  # (until this share of the time, row length)
TOKENS_PER_STEP = 2048
MUON_RATE, ADAM_RATE, WEIGHT_DECAY, BIAS_RATE = 0.02, 0.004, 0.01, 0.01
WARMUP_STEPS, FINAL_RATE = 40, 0.02
SAMPLE_PROMPTS = (
    f"{BOS}The capital of France is",
    f"{BOS}The river",
    f"{BOS}She looked at him and said",
    f"{BOS}{USER}What is gold?{ASSISTANT}",
    f"{BOS}{USER}How do I make Tomato Soup?{ASSISTANT}",
    f'{BOS}{USER}What does "happy" mean?{ASSISTANT}',
)


@dataclasses.dataclass
class TrainState:
    """Everything a checkpoint holds."""

    params: nnx.State
    other: nnx.State  # expert biases
    optimizer: Any
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


def rate_at(step: int, progress: float) -> float:
    """Learning-rate factor: linear warm-up over steps, times cosine decay over progress 0..1."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def row_length(progress: float) -> int:
    """Row length of the phase that progress 0..1 lies in."""
    return next(length for end, length in PHASES if progress < end or end == PHASES[-1][0])


def muon_axes(path: tuple[Any, ...], param: jax.Array) -> MuonDimensionNumbers | None:
    """Muon for the hidden matrices; None (AdamW) for embedding, head, router and norms."""
    if param.ndim < 2 or any(name in jax.tree_util.keystr(path) for name in ("embed", "lm_head", "router")):
        return None
    if param.ndim == 3 and "down" not in jax.tree_util.keystr(path):
        return MuonDimensionNumbers(0, 2)
    return MuonDimensionNumbers(param.ndim - 2, param.ndim - 1)


def make_optimizer(params: nnx.State) -> optax.GradientTransformation:
    """Muon with AdamW for the rest, at the peak learning rates."""
    return optax.contrib.muon(
        MUON_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_learning_rate=ADAM_RATE,
        adam_b2=0.98,
        muon_weight_dimension_numbers=jax.tree_util.tree_map_with_path(muon_axes, params),
    )


def split(model: DeepseekV3) -> tuple[Any, Any, Any]:
    """(graph, trained parameters, expert biases) of model."""
    graph, params, other = cast(tuple[Any, Any, Any], nnx.split(model, nnx.Param, ...))
    return graph, params, other


class Trainer:
    """Compiled steps around a TrainState."""

    def __init__(self, config: ModelConfig):
        self.graph, params, other = split(DeepseekV3(config, nnx.Rngs(0)))
        self.optimizer = make_optimizer(params)
        self.state = TrainState(params, other, jax.jit(self.optimizer.init)(params))

    @partial(jax.jit, static_argnums=0)
    def gradients(self, params: nnx.State, other: nnx.State, rows: jax.Array) -> Any:
        """((loss, expert load f32[layers, experts]), gradients) for rows int32[B, T + 1]."""

        def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            return loss_and_load(nnx.merge(self.graph, params, other), rows, exact=False)

        return jax.value_and_grad(loss, has_aux=True)(params)

    @partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
    def apply(self, params: nnx.State, other: nnx.State, state: Any, gradients: Any, load: jax.Array, rate: Any) -> Any:
        """New (params, other, optimizer state); rate scales the peak learning rates."""
        updates, state = self.optimizer.update(gradients, state, params)
        stepped = optax.apply_updates(params, jax.tree.map(lambda update: rate * update, updates))
        model = nnx.merge(self.graph, stepped, other)
        update_expert_biases(model, load, rate * BIAS_RATE)
        _, params, other = split(model)
        return params, other, state

    def train_step(self, rows: np.ndarray, rate: float) -> tuple[float, float]:
        """One update; returns the loss and the busiest expert's load relative to the mean."""
        state = self.state
        (loss, load), gradients = self.gradients(state.params, state.other, jnp.asarray(rows))
        balance = float((load.max(-1) / load.mean(-1)).max())
        state.params, state.other, state.optimizer = self.apply(
            state.params, state.other, state.optimizer, gradients, load, jnp.float32(rate)
        )
        return float(loss), balance

    def model(self) -> DeepseekV3:
        """The model as it is exported: weights rounded to bfloat16 (not the float32 router)."""

        def rounded(path: tuple[Any, ...], param: jax.Array) -> jax.Array:
            exact = "router" in jax.tree_util.keystr(path)
            return param if exact else param.astype(jnp.bfloat16).astype(jnp.float32)

        params = jax.tree_util.tree_map_with_path(rounded, self.state.params)
        return nnx.merge(self.graph, params, self.state.other)

    def save(self, path: Path) -> None:
        """Write the state atomically."""
        leaves = jax.tree.leaves((self.state.params, self.state.other, self.state.optimizer))
        arrays: dict[str, Any] = {f"leaf{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)}
        arrays["counters"] = np.array([self.state.step, self.state.seconds, self.state.tokens], np.float64)
        temporary = path.with_suffix(".part.npz")
        np.savez(temporary, **arrays)
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        """Continue from a saved state."""
        saved = np.load(path)
        old = (self.state.params, self.state.other, self.state.optimizer)
        leaves = [jnp.asarray(saved[f"leaf{index}"]) for index in range(len(jax.tree.leaves(old)))]
        params, other, optimizer = jax.tree.unflatten(jax.tree.structure(old), leaves)
        step, seconds, tokens = saved["counters"]
        self.state = TrainState(params, other, optimizer, int(step), float(seconds), int(tokens))


def held_out_loss(model: DeepseekV3, tokens: np.ndarray, length: int, limit: int) -> float:
    """Mean loss in nats per token over consecutive rows of at most limit held-out tokens."""
    graph, state = nnx.split(model)
    evaluate = jax.jit(lambda state, rows: loss_and_load(nnx.merge(graph, state), rows)[0])
    count = min(limit, tokens.size - 1) // length
    rows = [tokens[index * length : (index + 1) * length + 1] for index in range(count)]
    per_batch = max(1, 4096 // length)
    groups = [rows[start : start + per_batch] for start in range(0, count - per_batch + 1, per_batch)]
    return float(np.mean([evaluate(state, jnp.asarray(np.stack(group), jnp.int32)) for group in groups]))


def sample(model: DeepseekV3, dataset: Dataset, new_tokens: int) -> list[tuple[str, str]]:
    """Continuations of SAMPLE_PROMPTS at temperature 0.6, each until <|eos|> or new_tokens."""
    tokenizer, generator = dataset.tokenizer, np.random.default_rng(0)
    encoded = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in SAMPLE_PROMPTS]
    rows = np.zeros((len(encoded), max(map(len, encoded)) + new_tokens), np.int32)
    for row, ids in zip(rows, encoded, strict=True):
        row[: len(ids)] = ids
    graph, state = nnx.split(model)

    @jax.jit
    def forward(state: nnx.State, rows: jax.Array, last: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(rows)[0][jnp.arange(rows.shape[0]), last]

    for index in range(new_tokens):
        ends = np.array([len(ids) + index for ids in encoded])
        scores = np.asarray(forward(state, jnp.asarray(rows), jnp.asarray(ends - 1)), np.float64) / 0.6
        rows[np.arange(len(encoded)), ends] = np.argmax(scores + generator.gumbel(size=scores.shape), axis=-1)
    texts = []
    for prompt, row_ids, ids in zip(SAMPLE_PROMPTS, rows.tolist(), encoded, strict=True):
        answer: list[int] = row_ids[len(ids) : len(ids) + new_tokens]
        eos = tokenizer.token_to_id(EOS)
        answer = answer[: answer.index(eos)] if eos in answer else answer
        texts.append((prompt.replace(BOS, ""), tokenizer.decode(answer)))
    return texts


def publish(trainer: Trainer, dataset: Dataset, folder: Path, final: bool) -> None:
    """Evaluate the exported weights on held-out text and write the checkpoint folder."""
    state, model = trainer.state, trainer.model()
    limit, lengths = (65536, (256, 2048)) if final else (16384, (256,))
    losses = {length: held_out_loss(model, dataset.held_out, length, limit) for length in lengths}
    samples = sample(model, dataset, 96 if final else 24)
    parameters = sum(leaf.size for leaf in jax.tree.leaves((state.params, state.other)))
    facts = {
        "parameters": f"{parameters:,} ({2 * parameters / 2**20:.2f} MiB in bfloat16)",
        "training time": f"{state.seconds / 60:.0f} minutes on 2 shared CPU cores, {state.step:,} steps",
        "tokens seen": f"{state.tokens / 1e6:.2f} million of {dataset.train.size / 1e6:.2f} million",
        "row lengths": ", ".join(str(length) for _, length in PHASES),
    }
    for length, loss in losses.items():
        bits = loss / math.log(2) / dataset.bytes_per_token
        facts[f"held-out loss, rows of {length:,}"] = f"{loss:.3f} nats per token, {bits:.3f} bits per byte"
    card = model_card(facts, samples)
    export(folder, model, dataset.tokenizer, card)
    tqdm.write("\n".join(f"{key}: {value}" for key, value in facts.items()))
    tqdm.write("\n".join(f"[{prompt}] {text}" for prompt, text in samples))


def train(trainer: Trainer, dataset: Dataset, args: argparse.Namespace) -> None:
    """Run until the time budget is used, checkpointing and publishing on the way."""
    budget, state, checkpoint = 60 * args.minutes, trainer.state, args.work / "checkpoint.npz"
    streams: dict[int, Iterator[np.ndarray]] = {}
    average, next_save = 0.0, state.seconds + 60 * args.save_minutes
    next_publish = state.seconds + 60 * args.publish_minutes
    with tqdm(total=round(budget), initial=round(state.seconds), unit="s", mininterval=10) as bar:
        while state.seconds < budget:
            begin, progress = time.monotonic(), state.seconds / budget
            length = row_length(progress)
            if length not in streams:
                streams[length] = batches(dataset.train, TOKENS_PER_STEP // length, length, seed=state.step)
            loss, balance = trainer.train_step(next(streams[length]), rate_at(state.step, progress))
            if not math.isfinite(loss):
                raise SystemExit(f"the loss became {loss} at step {state.step}")
            average = loss if average == 0 else 0.95 * average + 0.05 * loss
            state.seconds += time.monotonic() - begin
            state.step, state.tokens = state.step + 1, state.tokens + TOKENS_PER_STEP
            bar.n = round(state.seconds)
            bar.set_postfix_str(f"step {state.step} loss {average:.3f} rows {length} imbalance {balance:.2f}")
            if state.seconds >= next_save:
                next_save = state.seconds + 60 * args.save_minutes
                trainer.save(checkpoint)
            if state.seconds >= next_publish:
                next_publish = state.seconds + 60 * args.publish_minutes
                publish(trainer, dataset, args.output, final=False)
    trainer.save(checkpoint)
    publish(trainer, dataset, args.output, final=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=50.0, help="training time budget")
    parser.add_argument("--save-minutes", type=float, default=4.0, help="time between checkpoints")
    parser.add_argument("--publish-minutes", type=float, default=12.0, help="time between exports")
    parser.add_argument("--work", type=Path, default=Path("build/small_model"), help="data and checkpoints")
    default = Path(__file__).resolve().parent.parent / "splash_jax" / "assets" / "small"
    parser.add_argument("--output", type=Path, default=default, help="where the model goes")
    args = parser.parse_args()
    config = ModelConfig()
    dataset = prepare(args.work, config.vocab_size)
    trainer = Trainer(config)
    if (args.work / "checkpoint.npz").exists():
        trainer.load(args.work / "checkpoint.npz")
    train(trainer, dataset, args)


if __name__ == "__main__":
    main()
