"""What a user can switch on where one text at a time is written, beside what the peers have for it.

All write on from the same beginnings. A way that claims to be exact must write the tokens of transformers' plain
way; a rounded one is marked by the share of these tokens that it keeps, and ours by its bits a byte too.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_nlp.compressing import quantize
from annotated_nlp.corpora.loaders import movie_reviews
from annotated_nlp.decoding import greedy
from annotated_nlp.gpt import GPT
from annotated_nlp.hub.tokenizers import load
from annotated_nlp.llama import Llama
from annotated_nlp.parts import fast
from annotated_nlp.parts.speculative import lookup, reading, speculate

from .measure import Different, interleave
from .peers import Contest, Gpt2, SmolLM2, random_ids

Write = Callable[[Tensor], list[int]]  # the tokens that follow a prompt (1 n)
CT2 = {"CTranslate2": "float32", "CTranslate2, int8": "int8"}
TORCHAO = "torchao, int8, compiled"  # on the book's model, since it rounds `nn.Linear` only
ONCE = {"realize_opcount_threshold": 1}  # a state is worked out once; the page `fast` says more
AHEAD = 4  # tokens that are guessed before the model checks them
# beginnings, their tokens, and the tokens that are written after each
SIZES = {"the book's GPT": (6, 17, 48), "GPT-2 124M": (1, 16, 48), "SmolLM2 135M": (1, 17, 48)}
NAMES = tuple(SIZES)
REVIEWS = {"the book's GPT": 200, "SmolLM2 135M": 20}  # whose bits are counted


@dataclass(frozen=True)
class Subject:
    "A decoder, beginnings for it to continue with `new` tokens each, and texts (rows, bytes) to mark it by."

    name: str
    contest: Contest
    gpt: GPT | Llama
    prompts: list[Tensor]
    new: int
    texts: list[tuple[Tensor, int]]


def subject(name: str, tiny: bool) -> Subject:
    "A model with real weights and film reviews, or GPT-2's shape with random weights, which has nothing to say."
    torch.manual_seed(0)
    count, length, new = (1, 4, 3) if tiny else SIZES[name]
    llama = name == "SmolLM2 135M"
    contest, kind, known = (SmolLM2(), Llama, "smollm2") if llama else (Gpt2(), GPT, "reviews-gpt")
    if name == "GPT-2 124M" or (llama and tiny):
        gpt = contest.ours(tiny).eval()
        prompts = [random_ids(gpt.config.vocab_size, 1, length) for _ in range(count)]
        return Subject(name, contest, gpt, prompts, new, [])
    gpt, tokenizer = kind.from_pretrained(f"annotated-nlp/{known}").eval(), load(f"annotated-nlp/{known}")
    begin, reviews = tokenizer.token_to_id("<|endoftext|>"), movie_reviews(split="test")
    rows = [[begin, *tokenizer.encode(review.text).ids[:96]] for review in reviews[: 2 if tiny else REVIEWS[name]]]
    texts = [(torch.tensor([row]), len(tokenizer.decode(row[1:]).encode())) for row in rows]
    return Subject(name, contest, gpt, [ids[:, :length] for ids, _ in texts[:count]], new, texts)


def bits_per_byte(gpt: GPT | Llama, texts: list[tuple[Tensor, int]]) -> float:
    "Of the texts, all but their first token."
    with torch.no_grad():
        nats = sum(F.cross_entropy(gpt(ids[:, :-1])[0], ids[0, 1:], reduction="sum").item() for ids, _ in texts)
    return nats / math.log(2) / sum(size for _, size in texts)


def read_each_token(gpt: nn.Module) -> int:
    "Bytes of weights that one more token has to read: all but the tables of which it needs a row."
    held = {x.data_ptr(): x for x in (*gpt.parameters(), *gpt.buffers())}
    if (table := getattr(gpt.embedding.positions, "table", None)) is not None:
        held.pop(table.data_ptr(), None)
    return sum(x.untyped_storage().nbytes() for x in held.values())


def bandwidth(seconds: float = 1.0) -> float:
    "Bytes a second that the processor reads from memory, by adding up numbers that don't fit into its caches."
    numbers, best, until = torch.ones(2**27), 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        numbers.sum()
        best = max(best, 4 * len(numbers) / (time.perf_counter() - started))
    return best


def plain(of: Subject, gpt: GPT | Llama, step: Callable | None = None) -> Write:
    "Greedy search, by the model's own step if no other is given."

    def write(prompt: Tensor) -> list[int]:
        state = gpt.start(prompt[:, :-1], max_len=prompt.shape[1] - 1 + of.new)
        return greedy(step or gpt.step, state, prompt[:, -1].contiguous(), max_new_tokens=of.new).ids[0].tolist()

    return write


def compiled(of: Subject, gpt: GPT | Llama) -> Write:
    "A step as a whole; of thirty blocks that would take minutes, so there each block is compiled by itself."
    if isinstance(gpt, GPT):
        return plain(of, gpt, torch.compile(gpt.step, dynamic=True, options=ONCE))
    gpt = deepcopy(gpt)
    for block in gpt.stack.layers:
        block.compile(dynamic=True, options=ONCE)
    gpt.logits = torch.compile(gpt.logits, dynamic=True, options=ONCE)
    return plain(of, gpt)


def ours(of: Subject, compile: bool) -> dict[str, tuple[GPT | Llama, Write]]:
    "Each way of the book with the model that it runs."

    def guessing(gpt: GPT | Llama) -> Write:
        read = reading(gpt)

        def write(prompt: Tensor) -> list[int]:
            state = gpt.start(prompt[:, :-1], max_len=prompt.shape[1] + of.new + AHEAD)
            draft = lookup(prompt[0].tolist(), gpt.config.vocab_size)
            return speculate(read, state, prompt[0, -1:], draft, ahead=AHEAD, max_new_tokens=of.new).ids[0].tolist()

        return write

    swapped, rounded = deepcopy(of.gpt), quantize(deepcopy(of.gpt), 8)
    fast.cpu(swapped)
    models = {"plain": of.gpt, "fast.cpu": swapped, "int8": rounded}
    ways = {name: (gpt, plain(of, gpt)) for name, gpt in models.items()}
    if compile:
        for name, gpt in models.items():
            ways[f"{name}, compiled"] = gpt, compiled(of, gpt)
    if of.texts:
        ways |= {"speculative": (of.gpt, guessing(of.gpt)), "speculative, int8": (rounded, guessing(rounded))}
    return ways


def theirs(of: Subject, compile: bool, folder: Path) -> dict[str, Write]:
    "transformers in its own modes; CTranslate2, in C++, and torchao where they are installed."
    model = of.contest.theirs(of.gpt)

    def generate(model: nn.Module = model, **how) -> Write:
        rules = dict(max_new_tokens=of.new, do_sample=False) | how

        def write(prompt: Tensor) -> list[int]:
            written = model.generate(prompt, attention_mask=torch.ones_like(prompt), **rules)
            return written[0, prompt.shape[1] :].tolist()

        return write

    ways = {"dynamic": generate(), "static": generate(cache_implementation="static")}
    if of.texts:
        ways["prompt lookup"] = generate(prompt_lookup_num_tokens=AHEAD)
    if compile:
        quick = of.contest.theirs(of.gpt)
        quick.forward = torch.compile(quick.forward)
        ways["static, compiled"] = generate(quick, cache_implementation="static")
    if find_spec("ctranslate2"):
        ways |= {name: translator(of, model, folder / kind, kind) for name, kind in CT2.items()}
    if compile and find_spec("torchao"):
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(rounded := deepcopy(of.gpt), Int8DynamicActivationInt8WeightConfig())
        ways[TORCHAO] = compiled(of, rounded)
    return ways


def translator(of: Subject, model: nn.Module, folder: Path, kind: str) -> Write:
    """A model of CTranslate2; its tokens are the numbers of ours, written out.

    In a process of its own: beside its threads, those of PyTorch take up to twice as long.
    """
    import transformers
    from tokenizers import Tokenizer, models

    names = [str(i) for i in range(of.gpt.config.vocab_size)]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="0"))
    model.save_pretrained(folder / "from")
    ends = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **ends).save_pretrained(folder / "from")
    process = ProcessPoolExecutor(1, get_context("spawn"), _convert, (folder, kind, torch.get_num_threads()))
    return lambda prompt: process.submit(_generate, prompt[0].tolist(), of.new).result()


def _convert(folder: Path, kind: str, threads: int) -> None:
    global _generator
    os.environ["KMP_BLOCKTIME"] = "0"  # threads that have nothing to do sleep
    import ctranslate2

    ctranslate2.converters.TransformersConverter(str(folder / "from")).convert(str(folder / "to"), quantization=kind)
    _generator = ctranslate2.Generator(str(folder / "to"), compute_type=kind, intra_threads=threads)


def _generate(prompt: list[int], new: int) -> list[int]:
    rules = dict(max_length=new, min_length=new, include_prompt_in_result=False, end_token=[])
    return _generator.generate_batch([[str(i) for i in prompt]], **rules)[0].sequences_ids[0]


def compare(name: str, rounds: int, tiny: bool, compile: bool) -> dict:
    """Every way's tokens a second, in turn; the tokens are compared first.

    Raises `Different` where a way without rounding writes other tokens.
    """
    of = subject(name, tiny)
    with TemporaryDirectory() as folder, torch.no_grad():
        mine = ours(of, compile)
        writers = {("ours", way): write for way, (_, write) in mine.items()}
        writers |= {("theirs", way): write for way, write in theirs(of, compile, Path(folder)).items()}
        written = {key: [write(prompt) for prompt in of.prompts] for key, write in writers.items()}
        wanted = torch.tensor(written["theirs", "dynamic"])
        same = {key: (torch.tensor(found) == wanted).float().mean().item() for key, found in written.items()}
        for (side, way), share in same.items():
            if share < 1 and "int8" not in way:
                raise Different(f"{name}: {side}, {way}, writes other tokens")
        calls = {key: lambda write=write: [write(prompt) for prompt in of.prompts] for key, write in writers.items()}
        times = interleave(calls, rounds, "cpu", tiny)
    tokens, speed = of.new * len(of.prompts), bandwidth(0.1 if tiny else 1.0)
    ways = []
    for (side, way), seconds in times.items():
        row = dict(side=side, way=way, same=same[side, way], seconds=seconds)
        row["tokens_per_s"] = tokens / statistics.median(seconds)
        if side == "ours":
            gpt = mine[way][0]
            row |= dict(bytes=read_each_token(gpt), limit=speed / read_each_token(gpt))
            row |= dict(bits_per_byte=bits_per_byte(gpt, of.texts)) if of.texts else {}
        ways.append(row)
    peer = [row for row in ways if row["side"] == "theirs" and row["way"] not in (*CT2, TORCHAO)]
    # of transformers, whose ways are all exact
    best = max(peer, key=lambda row: row["tokens_per_s"])["way"]
    for row in ways:  # round by round, as both meet the same disturbances
        row["ratio"] = statistics.median(b / a for a, b in zip(row["seconds"], times["theirs", best]))
    work = dict(prompts=len(of.prompts), length=of.prompts[0].shape[1], new=of.new)
    return dict(model=name, **work, bandwidth=speed, best=best, ways=ways)


def told(row: dict) -> str:
    "A table of one model."
    lines = [f"{row['model']}: {row['prompts']} x {row['new']} tokens, against {row['best']}"]
    lines[0] += f"; memory gives {row['bandwidth'] / 1e9:.1f} GB/s"
    for way in sorted(row["ways"], key=lambda way: -way["tokens_per_s"]):
        rest = f"  same {way['same']:.0%}"
        rest += f"  limit {way['limit']:,.0f}" if "limit" in way else ""
        rest += f"  {way['bits_per_byte']:.4f} bits a byte" if "bits_per_byte" in way else ""
        rate = f"{way['tokens_per_s']:8,.0f} tokens/s  {way['ratio']:5.2f}"
        lines.append(f"  {way['side']:6}  {way['way']:22}  {rate}{rest}")
    return "\n".join(lines)
