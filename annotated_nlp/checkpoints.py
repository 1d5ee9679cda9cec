"""Read what others trained and write what others can read: Hugging Face's files, one table of names a model."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Place(NamedTuple):
    """Where one of our tensors stands in a file: `names` side by side along axis 0, each `turned` or not."""

    names: tuple[str, ...]
    turned: bool


@dataclass(frozen=True)
class Layout:
    """How `transformers` writes a model down: its class, its options, its names of tensors.

    `config` makes ours with the defaults of theirs. `settings` maps our settings to their options; where
    several are named, all must be equal. `values` lists, for a setting, their words for each of ours, the one
    to write first. `expects` are options that our model has at one value only; `writes` are others that a
    file of ours should state.

    `names` maps our modules or tensors to theirs: `*` stands for the layer's number, `{query,key,value}` for
    tensors that we hold side by side, `^T` for matrices stored turned. Names may lack `base`, as in a file of
    the bare trunk, or have it in addition. `tied` are their second names of one tensor, `ignored` (with `*`)
    what our model has no use for.
    """

    architecture: str
    model_type: str
    config: Callable[..., Any]
    settings: Mapping[str, str | tuple[str, ...]]
    names: Mapping[str, str]
    base: str
    values: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    expects: Mapping[str, Any] = field(default_factory=dict)
    writes: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def read_config(self, theirs: Mapping[str, Any], **changes) -> Any:
        """Our configuration, with `changes` in place of what stands in theirs.

        Raises ValueError for an option that our model can't express.
        """
        for option, value in (self.expects | {"quantization_config": None}).items():
            if theirs.get(option, value) != value:
                raise ValueError(
                    f"{option}={theirs[option]!r} in config.json: this model can only compute {value!r}"
                )
        ours = {}
        for setting, options in self.settings.items():
            options = (options,) if isinstance(options, str) else options
            given = {option: theirs[option] for option in options if theirs.get(option) is not None}
            if setting in changes or not given:
                continue
            if len(set(map(str, given.values()))) > 1:
                both = ", ".join(f"{option}={value}" for option, value in given.items())
                raise ValueError(f"config.json has {both}: this model has one {setting}; pass {setting}=...")
            option, value = next(iter(given.items()))
            ours[setting] = self._our_value(setting, option, value)
        if "n_classes" not in changes and theirs.get("id2label"):
            ours["n_classes"] = len(theirs["id2label"])
        return self.config(**ours | changes)

    def _our_value(self, setting: str, option: str, value: Any) -> Any:
        known = self.values.get(setting)
        if known is None:
            return value
        for ours, theirs in known.items():
            if value in theirs:
                return ours
        words = ", ".join(repr(word) for words in known.values() for word in words)
        raise ValueError(f"{option}={value!r} in config.json: this model knows only {words}")

    def write_config(self, config: Any) -> dict[str, Any]:
        """Their configuration. Raises ValueError for settings that are lost when it is read back."""
        theirs = {"architectures": [self.architecture], "model_type": self.model_type}
        theirs |= self.expects | self.writes
        for setting, options in self.settings.items():
            value = getattr(config, setting)
            if setting in self.values:
                value = self.values[setting].get(value, (value,))[0]
            theirs |= dict.fromkeys((options,) if isinstance(options, str) else options, value)
        if hasattr(config, "n_classes"):
            theirs["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.n_classes)}
            theirs["label2id"] = {label: int(i) for i, label in theirs["id2label"].items()}
        ours, back = asdict(config), asdict(self.read_config(theirs))
        lost = {name: value for name, value in ours.items() if back[name] != value}
        if lost:
            raise ValueError(
                f"{self.architecture} has no {', '.join(f'{k}={v!r}' for k, v in lost.items())}: keep such a "
                "model with training.save_checkpoint"
            )
        return theirs

    def place(self, name: str) -> Place:
        """Where our tensor `name` stands in their file."""
        for ours, theirs in self.names.items():
            match = re.fullmatch(re.escape(ours).replace(r"\*", r"(\d+)") + r"(\.(?:weight|bias))?", name)
            if match:
                *layer, ending = match.groups(default="")
                theirs, turned = theirs.removesuffix("^T"), theirs.endswith("^T")
                before, _, rest = (theirs.replace("*", *layer) if layer else theirs).partition("{")
                parts, _, after = rest.partition("}")
                return Place(tuple(before + part + after + ending for part in parts.split(",")), turned)
        raise KeyError(f"{self.architecture}: the table of names has no line for {name}")

    def plain(self, theirs: str) -> str:
        """Their name without `base`, and with today's words for the gain and the shift of a norm."""
        theirs = theirs.removeprefix(self.base)
        return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", theirs))


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    "A fingerprint of names, shapes and every bit of the values."
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(tensors):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _folder(name: str | os.PathLike, revision: str | None) -> Path:
    "The local folder of that name, or the hub's model of that name, fetched."
    folder, text = Path(name), os.fspath(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise NotADirectoryError(f"{text} is a file: give the folder that holds config.json and {WEIGHTS}")
    wanted = ["config.json", "*.safetensors", INDEX]
    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=wanted))
    except HFValidationError:
        raise FileNotFoundError(f"no folder {text!r} here, and the name is none that the hub could have") from None
    except LocalEntryNotFoundError:
        raise ConnectionError(
            f"no folder {text!r} here, the hub can't be reached and nothing of that name was fetched before: "
            "go online, or give a folder"
        ) from None
    except HfHubHTTPError as error:
        raise FileNotFoundError(f"no folder {text!r} here, and the hub has no such model for you: {error}") from None


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} has no {path.name}: it is no folder of a saved model") from None
    except ValueError as error:  # JSON and UTF-8 alike
        raise ValueError(f"{path} is damaged, fetch or save it again: {error}") from None


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        names = sorted(set(_json(folder / INDEX)["weight_map"].values()))
    else:
        names = [WEIGHTS]
    lacking = [name for name in names if not (folder / name).exists()]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if lacking and pickles:
        raise ValueError(
            f"{folder} has {', '.join(pickles)} and no {', '.join(lacking)}: a pickle can run any code, so it is "
            "not read. Convert it where you trust it: transformers.AutoModel.from_pretrained(folder)"
            ".save_pretrained(folder)"
        )
    if lacking:
        raise FileNotFoundError(f"{folder} lacks {', '.join(lacking)}: fetch or save the model again")
    return [folder / name for name in names]


class _Files:
    """The tensors of some safetensors files, read one at a time."""

    def __init__(self, paths: list[Path], stack: ExitStack):
        self.opened = {}
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged or cut short, fetch or save it again: {error}") from None
            self._check(path, file)
            self.opened |= dict.fromkeys(file.keys(), file)

    @staticmethod
    def _check(path: Path, file: safe_open) -> None:
        saved = (file.metadata() or {}).get("blake2b")
        if saved and saved != _digest((name, file.get_tensor(name)) for name in file.keys()):
            raise ValueError(f"{path} is damaged: its values are not those that were saved; save or fetch it again")

    def __iter__(self) -> Iterator[str]:
        return iter(self.opened)

    def __getitem__(self, name: str) -> Tensor:
        return self.opened[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.opened[name].get_slice(name).get_shape())


def _few(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Pretrained:
    """Models that are read from Hugging Face's files and written to them, by the tables `layouts`."""

    layouts: ClassVar[tuple[Layout, ...]]

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike, *, fresh: Iterable[str] = (), revision: str | None = None, **changes
    ) -> Self:
        """The model in a local folder, or of that name on the hub, in evaluation mode.

        Reads config.json and model.safetensors, or its shards; never a pickle. `fresh` names modules that the
        file need not have and that keep their random start, as `fresh=["classifier"]`; `changes` replace
        settings of the configuration, as `dropout=0.0`. Values are converted to PyTorch's default dtype.
        Memory: one copy of the weights, the files being mapped.

        Raises FileNotFoundError for a folder or name that isn't there, ConnectionError when the hub can't be
        reached, ValueError for another model, an option that ours can't express, missing, foreign or misshapen
        tensors, a damaged file and a pickle.
        """
        folder = _folder(name, revision)
        theirs = _json(folder / "config.json")
        layout = next((x for x in cls.layouts if x.model_type == theirs.get("model_type")), None)
        if layout is None:
            known = ", ".join(repr(layout.model_type) for layout in cls.layouts)
            raise ValueError(f"{folder} holds a {theirs.get('model_type')!r}; {cls.__name__} reads {known}")
        config = layout.read_config(theirs, **changes)
        with torch.device("meta"):
            model = cls(config)
        fresh = (fresh,) if isinstance(fresh, str) else tuple(fresh)
        for part in fresh:
            if part not in dict(model.named_modules()):
                raise ValueError(f"fresh={part!r} is no module of {cls.__name__}; {_few(dict(model.named_children()))} are")
        with ExitStack() as stack:
            files = _Files(_weight_files(folder), stack)
            sources = _sources(model, layout, files, fresh, folder)
            model.to_empty(device="cpu")
            for part in fresh:
                model.get_submodule(part).apply(model.initialise)
            _copy(model, files, sources)
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike, *, max_shard_size: str = "5GB") -> None:
        """Write config.json and model.safetensors, in shards of at most `max_shard_size`.

        `transformers` and `from_pretrained` read them. A fingerprint goes with each file, so that damage shows.
        Each file is written beside and renamed: an interrupted call leaves no half file. Raises ValueError for
        settings that no layout of this model can express.
        """
        layout, theirs = self._writable()
        tensors = {}
        for name, tensor in self.state_dict().items():
            place = layout.place(name)
            for part, values in zip(place.names, tensor.chunk(len(place.names))):
                tensors[part] = values.T if place.turned and values.ndim == 2 else values
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        plan = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
        for file, names in plan.filename_to_tensors.items():
            shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
            metadata = {"format": "pt", "blake2b": _digest(shard.items())}
            _replace(folder / file, lambda path: save_file(shard, path, metadata))
        written = {*plan.filename_to_tensors}
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            _replace(folder / INDEX, lambda path: path.write_text(json.dumps(index, indent=2)))
            written.add(INDEX)
        for old in [folder / INDEX, *folder.glob("model*.safetensors")]:
            if old.name not in written:
                old.unlink(missing_ok=True)
        _replace(folder / "config.json", lambda path: path.write_text(json.dumps(theirs, indent=2)))

    def _writable(self) -> tuple[Layout, dict]:
        "The first layout that can say what this model is."
        refusals = []
        for layout in self.layouts:
            try:
                return layout, layout.write_config(self.config)
            except ValueError as error:
                refusals.append(str(error))
        raise ValueError("; ".join(refusals))


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    scratch = path.with_name(f".{path.name}.part")
    write(scratch)
    scratch.replace(path)


def _sources(
    model: nn.Module, layout: Layout, files: _Files, fresh: tuple[str, ...], folder: Path
) -> dict[str, Place]:
    """Where each tensor of the model stands, in the file's own names.

    Raises ValueError for tensors that are missing, foreign, misshapen, or tied to another and different.
    """
    found = {layout.plain(name): name for name in files}
    for second, first in layout.tied.items():
        second, first = found.pop(layout.plain(second), None), found.get(layout.plain(first))
        if second and first and not torch.equal(files[second], files[first]):
            raise ValueError(f"{folder}: {second} differs from {first}, but {type(model).__name__} has one for both")
    sources, used, missing, misshapen = {}, set(), [], []
    for name, tensor in model.state_dict().items():
        place = layout.place(name)
        names = [layout.plain(part) for part in place.names]
        used.update(names)
        if name.startswith(tuple(part + "." for part in fresh)):
            continue
        lacking = [part for part in names if part not in found]
        missing += lacking
        if lacking:
            continue
        sources[name] = Place(tuple(found[part] for part in names), place.turned)
        shape = _joined_shape(files, sources[name])
        if shape != tuple(tensor.shape):
            misshapen.append(f"{' + '.join(sources[name].names)} gives {shape}, {name} is {tuple(tensor.shape)}")
    foreign = [
        name for plain, name in found.items()
        if plain not in used and not any(fnmatch(plain, layout.plain(pattern)) for pattern in layout.ignored)
    ]
    complaints = []
    if missing:
        complaints.append(f"lacks {_few(missing)} (modules to be trained anew are named by fresh=[...])")
    if foreign:
        complaints.append(f"has tensors that {type(model).__name__} has no place for: {_few(foreign)}")
    if misshapen:
        complaints.append(f"has other shapes than config.json says: {_few(misshapen)}")
    if complaints:
        raise ValueError(f"{folder} " + "; it ".join(complaints))
    return sources


def _joined_shape(files: _Files, place: Place) -> tuple[int, ...]:
    shapes = [files.shape(name)[::-1] if place.turned else files.shape(name) for name in place.names]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@torch.no_grad()
def _copy(model: nn.Module, files: _Files, sources: Mapping[str, Place]) -> None:
    ours = model.state_dict()
    for name, place in sources.items():
        for part, target in zip(place.names, ours[name].chunk(len(place.names))):
            values = files[part]
            if not values.isfinite().all():
                raise ValueError(f"{part} holds NaN or infinity: the file is damaged, or the run that wrote it diverged")
            target.copy_(values.T if place.turned and values.ndim == 2 else values)
