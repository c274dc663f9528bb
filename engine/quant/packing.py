"""Small integers packed into words: the layouts that checkpoints use, and our own.

Ours, which the compiled kernels read: rows are cut into chunks of 32 values. At 4 bits value i and
value i + 16 of a chunk share byte i; at 2 bits two words hold 16 values each, lowest bits first; at
3 bits the low pairs lie so, and a third word holds the high bits; at 8 bits a value is a byte.
"""

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 32
BITS = (2, 3, 4, 8)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [words, columns] to uint8 [values, columns]: a stream of `bits` along the first
    dimension, lowest bits first; at 3 bits 32 values take 3 words."""
    count, columns = words.shape
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        fields: Tensor = (words[:, None] >> shifts[:, None]) & (2**bits - 1)
        return fields.to(torch.uint8).reshape(-1, columns)
    if bits != 3 or count % 3:
        raise ValueError(f"{count} words hold no whole chunks of {bits}-bit values")
    first, second, third = (words.view(-1, 3, columns).long() & 0xFFFFFFFF).unbind(1)
    low, high = first | second << 32, second | third << 32  # bits 0 to 63 and 32 to 95
    # Each value lies whole in one of them: those of the first eleven end by bit 33.
    values = [(low >> 3 * i if i < 11 else high >> 3 * i - 32) & 7 for i in range(32)]
    return torch.stack(values, 1).to(torch.uint8).reshape(-1, columns)


def row_bytes(columns: int, bits: int) -> int:
    """Bytes of a packed row in our layout."""
    return -(-columns // CHUNK) * CHUNK * bits // 8


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """uint8 [rows, columns] to our layout, uint8 [rows, row_bytes]."""
    padded = functional.pad(values, (0, -values.shape[1] % CHUNK)).contiguous()
    chunks = padded.view(len(values), -1, 2, 16)
    if bits == 8:
        return chunks.flatten(1)
    if bits == 4:
        return (chunks[:, :, 0] | chunks[:, :, 1] << 4).flatten(1)
    pairs = _joined((chunks & 3).int(), 2)
    if bits == 2:
        return pairs.view(torch.uint8).flatten(1)
    highs = _joined((chunks >> 2).int().flatten(2), 1)
    return torch.cat((pairs, highs[:, :, None]), dim=2).view(torch.uint8).flatten(1)


def unpack_rows(packed: Tensor, columns: int, bits: int) -> Tensor:
    """Back to uint8 [rows, columns]."""
    rows = len(packed)
    if bits == 8:
        return packed[:, :columns]
    chunks = packed.view(rows, -1, CHUNK * bits // 8)
    if bits == 4:
        return torch.cat((chunks & 15, chunks >> 4), dim=2).flatten(1)[:, :columns]
    words = chunks.contiguous().view(torch.int32)
    values = _separate(words[:, :, :2], 2, 16).flatten(2)
    if bits == 3:
        values = values | _separate(words[:, :, 2], 1, 32) << 2
    return values.flatten(1)[:, :columns].to(torch.uint8)


def _joined(fields: Tensor, bits: int) -> Tensor:
    """The last dimension's values as one int32, lowest bits first."""
    shifts = torch.arange(0, bits * fields.shape[-1], bits, device=fields.device)
    words = (fields.long() << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _separate(words: Tensor, bits: int, count: int) -> Tensor:
    shifts = torch.arange(0, bits * count, bits, dtype=torch.int32, device=words.device)
    fields: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return fields
