"""Processes that answer one benchmark case at a time, so that each side has the machine to itself while it runs."""

import multiprocessing
import os
import platform
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False, "bos_token_id": 0,
    "dtype": "float32", "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 512,
    "intermediate_size": 1536, "kv_lora_rank": 128, "max_position_embeddings": 8192, "moe_intermediate_size": 384,
    "n_group": 4, "n_routed_experts": 16, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 8, "num_key_value_heads": 16, "q_lora_rank": 256,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-6, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "topk_group": 2, "v_head_dim": 64, "vocab_size": 32000,
}  # fmt: skip

# Freed memory stays in the process: without this torch gives it back and asks again at every step.
MALLOC = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456"

PROMPT_ROWS = 512  # per step
WEIGHT_BYTES = 640 << 20  # room for the whole model on every rank
TOKEN_BYTES = 4 * (CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"]) * (CONFIG["num_hidden_layers"] + 4)

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    batch: int
    context: int
    new: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine does at most, measured in the same session."""

    bytes_per_s: float
    flops_per_s: float

    def decode(self, case: Case) -> tuple[float, str]:
        """Tokens per second if every weight a step needs and every history were read once, or all products ran at the
        matmul rate; whichever is less, and its name. The experts a step reads are those a uniform router would choose.
        """
        c, layers = CONFIG, CONFIG["num_hidden_layers"]
        d, H, r, lat, rope = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"], 32
        nope, v, f, E, k = c["qk_nope_head_dim"], c["v_head_dim"], c["moe_intermediate_size"], 16, 2
        attention = d * r + r * H * (nope + rope) + d * (lat + rope) + H * lat * (nope + v) + H * v * d
        dense, expert, head = 3 * d * c["intermediate_size"], 3 * d * f, d * c["vocab_size"]
        touched = E * (1 - (1 - k / E) ** case.batch)
        weights = layers * attention + dense + (layers - 1) * (touched + 1) * expert + head
        per_row = layers * attention + dense + (layers - 1) * (k + 1) * expert + head
        history = case.batch * case.context * (lat + rope) * layers
        products = case.batch * (per_row + case.context * H * (2 * lat + rope) * layers)
        memory_s, compute_s = 4 * (weights + history) / self.bytes_per_s, 2 * products / self.flops_per_s
        return case.batch / max(memory_s, compute_s), "memory" if memory_s > compute_s else "matmul"


class Worker:
    """A process that answers cases."""

    def __init__(self, function: Callable[..., Callable[[Any], Answer | None]], *args: Any) -> None:
        os.environ["GLIBC_TUNABLES"] = MALLOC
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, function, args), daemon=True)
        self._process.start()

    def ask(self, case: Any) -> Any:
        self._here.send(case)
        failed, answer = self._here.recv()
        if failed:
            raise RuntimeError(answer)
        return answer

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()


def _serve(pipe: Any, function: Callable[..., Callable[[Any], Answer | None]], args: tuple[Any, ...]) -> None:
    answer: Callable[[Any], Answer | None] | None = None
    while True:
        case = pipe.recv()
        try:
            answer = answer or function(*args)
            pipe.send((False, answer(case)))
        except Exception:
            pipe.send((True, traceback.format_exc()))


def cpu_name() -> str:
    """The processor's name, and which matrix instructions it has."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    has = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', platform.processor() or platform.machine())} ({', '.join(has) or 'no AVX'})"


def limits_worker(folder: Path) -> Callable[[Any], Answer]:
    """Writes the model, then measures memory bandwidth (a matrix-vector product) and the float32 matmul rate."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    from splash_jax.models.random_checkpoint import write_random_checkpoint

    write_random_checkpoint(folder, CONFIG)

    def best(function: Callable[[], Any], repeats: int = 7) -> float:
        jax.block_until_ready(function())
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            jax.block_until_ready(function())
            times.append(time.perf_counter() - begun)
        return min(times)

    def measure(_: Any) -> Answer:
        matrix, vector = jnp.ones((16384, 4096)), jnp.ones((4096,))
        read = jax.jit(lambda m, v: m @ v)
        square = jnp.ones((2048, 2048))
        multiply = jax.jit(lambda a, b: a @ b)
        return {
            "bytes_per_s": matrix.nbytes / best(lambda: read(matrix, vector)),
            "flops_per_s": 2 * 2048**3 / best(lambda: multiply(square, square)),
        }

    return measure


def engine_worker(folder: Path, devices: int, layout: str, dtype: str = "float32") -> Callable[[Case], Answer]:
    """The engine on `devices` devices, a fresh one for each case, its programs compiled before anything is timed."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if devices > 1:
        os.environ["NPROC"] = "32"
    import numpy as np

    from splash_jax import LLM, SamplingParams

    def run(case: Case) -> Answer:
        waiting = case.batch * case.context // PROMPT_ROWS  # steps until the last prompt is in
        longest = case.context + case.new + waiting + 128  # pages to spare for everyone
        llm = LLM(
            folder,
            num_devices=devices,
            layout=layout,
            layouts=(layout,),
            dtype=dtype,
            max_num_seqs=case.batch,
            max_model_len=longest,
            device_memory_bytes=WEIGHT_BYTES + 2 * TOKEN_BYTES * case.batch * longest,
            block_size=64,
            prefill_tile=64,
            max_num_batched_tokens=PROMPT_ROWS,
            decode_buckets=(case.batch,),
            scoring=False,
            penalties=False,
            skip_tokenizer_init=True,
        )
        rng = np.random.default_rng(case.batch)
        prompts = [rng.integers(3, CONFIG["vocab_size"], case.context).tolist() for _ in range(case.batch)]
        llm.generate(prompts[0][:65], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        first = len(llm.records)
        # Whoever finishes its prompt early draws until the last one has drawn `new` tokens beside it.
        waits = [-(-(case.batch - 1 - i) * case.context // PROMPT_ROWS) + 2 for i in range(case.batch)]
        llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=case.new + w, ignore_eos=True) for w in waits])
        records = llm.records[first:]
        prompt = [r for r in records if r.rows > case.batch]
        return {
            "step_s": [r.seconds for r in records if r.rows == r.drawn == case.batch],
            "prefill_tok_s": sum(r.rows for r in prompt) / sum(r.seconds for r in prompt),
        }

    return run


def hugging_face_worker(folder: Path) -> Callable[[Case], Answer | None]:
    """transformers' own loop with its key-value cache, float32; answers None where torch or it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM, DynamicCache
    except ImportError:
        return lambda case: None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def run(case: Case) -> Answer:
        ids = torch.randint(3, CONFIG["vocab_size"], (case.batch, case.context))
        cache = DynamicCache(config=model.config)
        # Its attention falls back to all scores at once on CPU: long prompts go in pieces.
        piece = max(64, min(case.context, int(3e9 / (case.batch * CONFIG["num_attention_heads"] * case.context * 4))))
        begun = time.perf_counter()
        for start in range(0, case.context, piece):
            out = model(ids[:, start : start + piece], past_key_values=cache, use_cache=True, logits_to_keep=1)
        prefill = time.perf_counter() - begun
        token, steps, limit = out.logits[:, -1].argmax(-1, keepdim=True), [], time.perf_counter() + 60
        while len(steps) < case.new + 1 and (len(steps) < 4 or time.perf_counter() < limit):
            begun = time.perf_counter()
            out = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            steps.append(time.perf_counter() - begun)
        return {"step_s": steps[1:], "prefill_tok_s": case.batch * case.context / prefill}

    return run
