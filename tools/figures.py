"""Store figures in a third of their bytes: `python -m tools.figures [05_attention ...]`, in all if none is named.

A figure of lines and letters has few colours: 256 of its own are enough, and a byte a pixel. `make chapters` stores new
ones so. GitHub shows no notebook of more than a megabyte.
"""

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

NBS = Path(__file__).resolve().parent.parent / "nbs"
UNSEEN = 0.1  # of 255 levels of brightness: the mean difference that nobody sees


def lighter(png: bytes) -> bytes:
    "The picture in 256 colours; as it is, if it has more, is seen through, or would not be smaller."
    with Image.open(io.BytesIO(png)) as image:
        clear = image.mode == "RGBA" and image.getchannel("A").getextrema() != (255, 255)
        if clear or image.mode not in ("RGB", "RGBA"):
            return png
        plain, dpi = image.convert("RGB"), image.info.get("dpi")
    few = plain.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE)
    off = np.abs(np.asarray(few.convert("RGB"), dtype=np.int16) - np.asarray(plain, dtype=np.int16))
    out = io.BytesIO()
    few.save(out, "PNG", optimize=True, dpi=dpi)
    return out.getvalue() if off.mean() < UNSEEN and len(out.getvalue()) < len(png) else png


def lighten(cell) -> None:
    "Every figure that a cell has stored."
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" in data:
            png = base64.b64decode("".join(data["image/png"]))
            if (small := lighter(png)) is not png:
                data["image/png"] = base64.b64encode(small).decode()


def main() -> int:
    wanted = {name.removesuffix(".ipynb") for name in sys.argv[1:]}
    for path in sorted(NBS.rglob("[!.]*.ipynb")):
        if ".ipynb_checkpoints" in path.parts or wanted and path.stem not in wanted:
            continue
        page = json.loads(before := path.read_text(encoding="utf-8"))
        for cell in page["cells"]:
            lighten(cell)
        text = json.dumps(page, indent=1, ensure_ascii=False, sort_keys=True) + "\n"  # as nbdev_clean writes it
        if text != before:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(NBS)}: {len(before.encode()):,} bytes before, {len(text.encode()):,} now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
