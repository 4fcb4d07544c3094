"""Another decoder of delta frames (codec ``scf/1``), written from docs/PROTOCOL.md alone.

Slow and plain. It shares no code with the product: the standard library and zstandard only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zstandard

# number: (bytes, shift and mask of the exponent, sign and magnitude)
TYPES = {
    0: (1, 0, 0, False),
    1: (2, 7, 0xFF, True),
    2: (2, 10, 0x1F, True),
    3: (4, 23, 0xFF, True),
    4: (8, 52, 0x7FF, True),
    5: (1, 3, 0xF, True),
    6: (1, 2, 0x1F, True),
    7: (2, 0, 0, False),
    8: (4, 0, 0, False),
    9: (8, 0, 0, False),
}
RAW, ZSTD, ZSTD_BASE, SAME, CHANGES, DIFFERENCES, PLANES, SUBTRACTED, XORED = range(9)
BASED = {ZSTD_BASE, SAME, CHANGES, DIFFERENCES, SUBTRACTED, XORED}
ONE = 1 << 16


class Numbers:
    """LEB128 numbers and bytes, from the front."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data)
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def signed(self) -> int:
        value = self.number()
        return -(value + 1) // 2 if value & 1 else value // 2


def decode(frame: bytes, base: Callable[[int, int, int], bytes]) -> bytes:
    """What a frame rebuilds; ``base(file, offset, length)`` gives the bytes of the base."""
    numbers = Numbers(frame)
    assert numbers.take(4) == b"SCF1"
    target = numbers.number()
    groups = [(*numbers.take(2), numbers.number()) for _ in range(numbers.number())]
    pieces: list[tuple[int, int, bytes | None]] = []  # group, length, old
    file = end = 0
    for _ in range(numbers.number()):
        length, group = numbers.number(), numbers.number()
        old = None
        if groups[group][0] in BASED:
            file += numbers.signed()
            offset = end + numbers.signed()
            old, end = base(file, offset, length), offset + length
        pieces.append((group, length, old))
    done: list[bytes] = []
    for index, (mode, kind, size) in enumerate(groups):
        payload = numbers.take(size)
        mine = [(length, old) for group, length, old in pieces if group == index]
        joined = b"".join(old or b"" for _, old in mine)
        done.append(rebuild(mode, kind, payload, [n for n, _ in mine], joined))
    assert numbers.at == len(frame)
    out, at = [], [0] * len(groups)
    for group, length, _ in pieces:
        out.append(done[group][at[group] : at[group] + length])
        at[group] += length
    result = b"".join(out)
    assert len(result) == target
    return result


def rebuild(mode: int, kind: int, payload: bytes, lengths: Sequence[int], old: bytes) -> bytes:
    """The bytes of a group, one segment after the other."""
    width, length = TYPES[kind][0], sum(lengths)
    if mode == RAW:
        return payload
    if mode == SAME:
        return old
    if mode == ZSTD:
        return zstandard.ZstdDecompressor().decompress(payload)
    if mode == ZSTD_BASE:
        known = None
        if len(old) >= 8:
            known = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        return zstandard.ZstdDecompressor(dict_data=known).decompress(payload)
    if mode == CHANGES:
        elements = [int.from_bytes(old[k : k + width], "little") for k in range(0, length, width)]
        counts = [length // width for length in lengths]
        changed = apply_changes(kind, payload, elements, counts)
        return b"".join(value.to_bytes(width, "little") for value in changed)
    planes = read_planes(payload, width)
    values = [
        sum(plane[k] << 8 * j for j, plane in enumerate(planes)) for k in range(length // width)
    ]
    bits = 8 * width
    if mode == PLANES:
        floats = TYPES[kind][3]
        plain = [v >> 1 | (v & 1) << (bits - 1) if floats else v for v in values]
    else:
        plain = []
        for k, v in enumerate(values):
            step = -(v + 1) // 2 if v & 1 else v // 2
            before = int.from_bytes(old[k * width : (k + 1) * width], "little")
            if mode == SUBTRACTED:
                plain.append((before + v) % (1 << bits))
                continue
            if mode == XORED:
                plain.append(before ^ v)
                continue
            plain.append(from_order(to_order(before, kind) + step, kind))
    return b"".join(value.to_bytes(width, "little") for value in plain)


def read_planes(payload: bytes, width: int) -> list[bytes]:
    """Byte planes, the lowest byte first."""
    planes, at = [], 0
    for _ in range(width):
        flag, size = payload[at], int.from_bytes(payload[at + 1 : at + 5], "little")
        body = payload[at + 5 : at + 5 + size]
        planes.append(zstandard.ZstdDecompressor().decompress(body) if flag else body)
        at += 5 + size
    assert at == len(payload)
    return planes


def to_order(bits: int, kind: int) -> int:
    """Numbers in the order of the values."""
    width, _, _, floats = TYPES[kind]
    sign = 1 << (8 * width - 1)
    if floats and bits & sign:
        return bits ^ (2 * sign - 1)
    return bits ^ sign


def from_order(order: int, kind: int) -> int:
    """Its inverse, of any integer."""
    width, _, _, floats = TYPES[kind]
    sign = 1 << (8 * width - 1)
    order %= 2 * sign
    if floats and not order & sign:
        return order ^ (2 * sign - 1)
    return order ^ sign


# --- the entropy coder ----------------------------------------------------------------------------


@dataclass
class Table:
    """Adaptive frequencies that add up to 2^14."""

    counts: list[int]
    left: int = 16
    pause: int = 16
    widths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rebuild()

    def rebuild(self) -> None:
        spread, total = (1 << 14) - len(self.counts), sum(self.counts)
        share = (spread << 32) // total
        self.widths = [1 + (count * share >> 32) for count in self.counts]
        self.widths[self.counts.index(max(self.counts))] += (1 << 14) - sum(self.widths)

    def learn(self, symbol: int) -> None:
        self.counts[symbol] += 32
        self.left -= 1
        if self.left == 0:
            if sum(self.counts) > 1 << 18:
                self.counts = [count >> 1 | 1 for count in self.counts]
            self.rebuild()
            self.pause = min(2 * self.pause, 512)
            self.left = self.pause


class Coded:
    """Words from the front for two rANS states of 32 bits; plain bits from the end."""

    def __init__(self, payload: bytes) -> None:
        self.payload, self.at = payload, 11
        self.states = [int.from_bytes(payload[k : k + 4], "little") for k in (3, 7)]
        self.used = 0

    def advance(self, which: int, start: int, width: int) -> None:
        state = self.states[which]
        state = width * (state >> 14) + (state & 0x3FFF) - start
        if state < 1 << 16:
            state = state << 16 | int.from_bytes(self.payload[self.at : self.at + 2], "little")
            self.at += 2
        self.states[which] = state

    def symbol(self, which: int, table: Table) -> int:
        slot, start = self.states[which] & 0x3FFF, 0
        for symbol, width in enumerate(table.widths):
            if slot < start + width:
                self.advance(which, start, width)
                table.learn(symbol)
                return symbol
            start += width
        raise AssertionError

    def bit(self, which: int, shares: list[int], context: int, rate: int) -> int:
        """A bit, by the share of zeros among 2^14, which follows."""
        zeros = shares[context]
        bit = int(self.states[which] & 0x3FFF >= zeros)
        self.advance(which, zeros if bit else 0, (1 << 14) - zeros if bit else zeros)
        shares[context] += -(zeros >> rate) if bit else ((1 << 14) - zeros) >> rate
        return bit

    def bits(self, count: int) -> int:
        value = 0
        for _ in range(count):
            byte = self.payload[-1 - self.used // 8]
            value = value << 1 | byte >> 7 - self.used % 8 & 1
            self.used += 1
        return value

    def is_used_up(self) -> bool:
        left = -(-self.used // 8)
        assert self.bits(-self.used % 8) == 0
        return self.at + left == len(self.payload) and self.states == [1 << 16, 1 << 16]


# log2(1 + i / 64) in 16 fractional bits: round(65536 * log2(1 + i / 64))
LOG2 = [
    0, 1466, 2909, 4331, 5732, 7112, 8473, 9814, 11136, 12440, 13727, 14996, 16248, 17484, 18704,
    19909, 21098, 22272, 23433, 24579, 25711, 26830, 27936, 29029, 30109, 31178, 32234, 33279,
    34312, 35334, 36346, 37346, 38336, 39316, 40286, 41246, 42196, 43137, 44068, 44990, 45904,
    46809, 47705, 48593, 49472, 50344, 51207, 52063, 52911, 53751, 54584, 55410, 56229, 57040,
    57845, 58643, 59434, 60219, 60997, 61769, 62534, 63294, 64047, 64794, 65536,
]  # fmt: skip


def log2_of_half(twice: int) -> int:
    """log2(twice / 2), 16 fractional bits."""
    top = twice.bit_length() - 1
    fraction = (twice >> top - 22 if top >= 22 else twice << 22 - top) & (1 << 22) - 1
    low, rest = LOG2[fraction >> 16], fraction & 0xFFFF
    return (top - 1) * ONE + low + ((LOG2[(fraction >> 16) + 1] - low) * rest >> 16)


def bucket(gap: int) -> tuple[int, int]:
    """The bucket of a gap, and how many bits follow."""
    top = (gap + 4).bit_length() - 1
    return (top - 2) * 4 + ((gap + 4 >> top - 2) & 3), top - 2


def bucket_start(symbol: int) -> tuple[int, int]:
    """The lowest gap of a bucket, and how many bits follow."""
    extra = symbol // 4
    return ((4 | symbol & 3) << extra) - 4, extra


def power(base: int, exponent: int) -> int:
    """base^exponent, 32 fractional bits, by squaring from the lowest bit on."""
    result = 1 << 32
    while exponent:
        if exponent & 1:
            result = result * base >> 32
        base = base * base >> 32
        exponent >>= 1
    return result


def first_gaps(context: int, symbols: int) -> Table:
    """Gaps of changes that fall by chance, with the mean gap of a context."""
    quarter = 2 * context + 3
    mean = ((65536, 77936, 92682, 110218)[quarter & 3] << (quarter >> 2)) >> 8
    stay = (1 << 32) - (1 << 40) // (mean + 256)
    counts, before = [], 1 << 32
    for symbol in range(symbols):
        after = power(stay, bucket_start(symbol + 1)[0]) if symbol + 2 < symbols else 0
        last = symbol + 1 == symbols
        counts.append(1 if last else 1 + ((before - after) * 400 * 32 >> 32))
        before = after
    return Table(counts)


def read_gaps(coded: Coded, count: int, first: int) -> list[list[int]]:
    """For each class, which of its elements change: counted within the class."""
    symbols = bucket(count)[0] + 2
    tables: dict[int, Table] = {}
    changed: list[list[int]] = []
    turn = 0
    for k in range(12):
        mine: list[int] = []
        mean = first * ONE // 4 + k * ONE
        before = context = min(max(mean + ONE // 4 >> 15, 0), 47)
        at = 0
        while True:
            if before not in tables:
                tables[before] = first_gaps(before, symbols)
            symbol = coded.symbol(turn, tables[before])
            turn = 1 - turn
            if symbol == symbols - 1:
                break
            start, extra = bucket_start(symbol)
            at += start + coded.bits(extra)
            mine.append(at)
            at += 1
            # What a gap teaches is used for the last but one after it.
            rate = ONE // (len(mine) + 1) if len(mine) < 49 else ONE // 50
            mean += (log2_of_half(2 * start + (1 << extra)) - mean) * rate >> 16
            before, context = context, min(max(mean + ONE // 4 >> 15, 0), 47)
        changed.append(mine)
    return changed


def apply_changes(
    kind: int, payload: bytes, elements: Sequence[int], segments: Sequence[int]
) -> list[int]:
    """The elements after the changes that a payload tells; segments by their elements."""
    _, shift, mask, _ = TYPES[kind]
    lowest, first = int.from_bytes(payload[:2], "little"), payload[2]
    assert lowest <= mask
    coded = Coded(payload)
    due = read_gaps(coded, len(elements), first)
    # Where the changes are: by segment, piece of it, class, element.
    places: list[tuple[int, int, int, int]] = []
    seen = [0] * 12
    position = 0
    for segment, count in enumerate(segments):
        for index in range(count):
            k = min(max((elements[position] >> shift & mask) - lowest, 0), 11)
            if due[k] and due[k][0] == seen[k]:
                del due[k][0]
                places.append((segment, index // 512, k, position))
            seen[k] += 1
            position += 1
    value_tables: dict[int, Table] = {}
    ones, signs = [14336] * 32, [8192] * 16
    last = 0
    result = list(elements)
    for *_, position in sorted(places):
        old = elements[position]
        context = min(max((old >> shift & mask) - lowest + 8, 0), 31)
        size = 1
        if coded.bit(0, ones, context, 5):
            if context not in value_tables:
                value_tables[context] = Table([8] * 8 + [1] * 60)
            symbol = coded.symbol(0, value_tables[context])
            size = symbol + 2
            if symbol > 6:
                size = 1 << symbol - 4 | coded.bits(symbol - 4)
        down = coded.bit(1, signs, last, 6)
        last = (last << 1 | down) & 15
        result[position] = from_order(to_order(old, kind) + (-size if down else size), kind)
    assert coded.is_used_up()
    assert not any(due)
    return result
