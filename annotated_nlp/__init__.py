"""Attention, Transformers and pretraining: the package that falls out of the book.

    import annotated_nlp

    gpt, tokenizer = annotated_nlp.load("annotated-nlp/reviews-gpt")
    ids = torch.tensor([tokenizer.encode("The film").ids])
    print(tokenizer.decode(gpt.generate(ids, 30, temperature=0.8)[0].tolist()))

Every model and its configuration is here by name and is imported when it is asked for, as is `load`: a model with its
tokenizer, from a folder or by its name on the hub. All else is in the chapters' modules (`annotated_nlp.attention`,
`.decoding`, `.training`, ...) and in the rooms `parts`, `hub`, `corpora`, `tasks` and `show`.
"""

__version__ = "0.1.0"

from importlib import import_module as _import

_HOMES = {
    "seq2seq": "Seq2Seq Seq2SeqConfig",
    "transformer": "Transformer TransformerConfig",
    "contextual": "LSTMLanguageModel LSTMConfig ELMo ElmoConfig UlmfitClassifier",
    "gpt": "GPT GPTConfig GPTForSequenceClassification",
    "bert": "Bert BertConfig BertForMaskedLM BertForPreTraining BertForQuestionAnswering "
    "BertForSequenceClassification BertForTokenClassification",
    "bert_family": "Roberta RobertaConfig RobertaForMaskedLM SpanBert Albert AlbertConfig AlbertForMaskedLM "
    "AlbertForSentenceOrder",
    "parts.deberta": "Deberta DebertaConfig DebertaForMaskedLM DebertaForPreTraining",
    "parts.canine": "Canine CanineConfig",
    "parts.xlnet": "XLNet XLNetConfig",
    "electra": "Electra ElectraConfig ElectraForMaskedLM ElectraForPreTraining ElectraPair "
    "ElectraForSequenceClassification ElectraForTokenClassification",
    "llama": "Llama LlamaConfig",
    "t5": "T5 T5Config",
    "vit": "ViT ViTConfig DeiT DeiTConfig",
    "captioning": "Captioner CaptionerConfig ShowAndTell",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
_MODULES = (
    "adapting alignment attention bert bert_family captioning compressing contextual data decoding denoising electra gpt "
    "inverse lab llama probing sentences seq2seq t5 tokenization training transformer vectors vit "
    "parts hub corpora tasks show"
).split()

__all__ = ["load", *_HOME]


def __getattr__(name):
    if name == "load":
        return _import("annotated_nlp.hub.checkpoints").model_and_tokenizer
    if name in _HOME:
        return getattr(_import(f"annotated_nlp.{_HOME[name]}"), name)
    if name in _MODULES:
        return _import(f"annotated_nlp.{name}")
    raise AttributeError(f"module 'annotated_nlp' has no attribute {name!r}; dir(annotated_nlp) lists what it has")


def __dir__():
    return sorted([*__all__, *_MODULES, "__version__"])
