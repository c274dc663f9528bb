"""The same weights in the form that each peer reads: a Transformers folder in 16 or 32 bits or with
INT8 layers, or a GGUF file of BF16 or Q8_0.

From a GGUF file that is quantized, its dequantized values; made once, under a temporary name, and
kept. A folder given by the user is used as it is.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal


def as_folder(model: Path, dtype: str, cache: Path) -> Path:
    """config.json, safetensors in `dtype` and tokenizer files. Needs transformers for a GGUF."""
    if model.is_dir():
        return model
    target = cache / f"{model.stem}-{dtype}"
    if target.is_dir():
        return target
    import torch
    import transformers

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        made = Path(temporary) / "model"
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=getattr(torch, dtype)
        )
        # It remembers that it came from a GGUF file and refuses to be saved: a fresh one does not.
        settings = {
            key: value
            for key, value in loaded.config.to_dict().items()
            if key not in ("quantization_config", "dtype", "torch_dtype")
        }
        config = type(loaded.config)(**settings)
        plain = transformers.AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(made)
        transformers.AutoTokenizer.from_pretrained(
            model.parent, gguf_file=model.name
        ).save_pretrained(made)
        shutil.move(made, target)
    return target


def as_int8_folder(model: Path, cache: Path) -> Path:
    """compressed-tensors: INT8 weights a channel, INT8 activations a token, rounded to nearest."""
    target = cache / f"{model.stem}-w8a8"
    if target.is_dir():
        return target
    source = as_folder(model, "float32", cache)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        made = Path(temporary) / "model"
        command = [sys.executable, "-P", "-m", "headrace.producer.cli", "quantize", str(source)]
        command += ["--to", "int8", "--method", "rtn", "--no-clip", "-o", str(made)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        shutil.move(made, target)
    return target


def as_gguf(model: Path, kind: Literal["BF16", "Q8_0"], cache: Path) -> Path:
    """The file with every matrix dequantized and stored as `kind`; vectors stay float32."""
    target = cache / f"{model.stem}-{kind}.gguf"
    if target.is_file():
        return target
    import gguf

    cache.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    temporary = target.with_name(target.name + ".tmp")
    writer = gguf.GGUFWriter(temporary, architecture)
    for name, value in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value.contents(), value.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    stored = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(target)
    return target
