/* The codec's inner loops: what changed between two arrays of numbers, coded in few bits.
 *
 * A change is coded by its place and its difference. Its place is a gap counted among the elements
 * of the same exponent class of the *base*, which both sides know: an optimiser moves every weight by
 * about the same amount, so small weights, whose neighbours are close, change far more often. Its
 * difference is taken in the order of the values, given the exponent and the signs of the differences
 * before. All places come first, class by class; then all differences. Both go through an adaptive range-free entropy coder (rANS, Duda 2013).
 *
 * Nothing here trusts its input: every read and write is bounded by the buffers that were given, every
 * loop by the number of elements or of coded words. Integers only, so that every machine gives the same bytes.
 * The AVX2 and AVX-512 paths are chosen at run time and give what the portable one gives.
 */
#ifndef KERNEL_WITHOUT_PYTHON /* the fuzzer takes the rest alone */
#define PY_SSIZE_T_CLEAN
#include <Python.h> /* Py_LIMITED_API comes from setup.py */
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "elements are stored little-endian; on other machines load() and store() must swap them"
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_AVX2_PATH 1
#include <immintrin.h>
#else
#define HAVE_AVX2_PATH 0
#endif
#if HAVE_AVX2_PATH && (defined(__clang__) || __GNUC__ >= 9)
#define HAVE_AVX512_PATH 1
#else
#define HAVE_AVX512_PATH 0
#endif

/* --- elements ---------------------------------------------------------------------------------- */

typedef struct {
    int width;       /* bytes */
    int shift;       /* of the exponent */
    uint64_t mask;   /* of the exponent after the shift; 0: none, all elements are one class */
    int is_float;    /* sign and magnitude; else two's complement */
} Type;

enum { TYPES = 10 };
static const Type TYPE[TYPES] = {
    {1, 0, 0, 0},      /* bytes, int8, bool, packed fours */
    {2, 7, 0xff, 1},   /* bfloat16 */
    {2, 10, 0x1f, 1},  /* float16 */
    {4, 23, 0xff, 1},  /* float32 */
    {8, 52, 0x7ff, 1}, /* float64 */
    {1, 3, 0xf, 1},    /* float8 e4m3 */
    {1, 2, 0x1f, 1},   /* float8 e5m2 */
    {2, 0, 0, 0},      /* int16 */
    {4, 0, 0, 0},      /* int32 */
    {8, 0, 0, 0},      /* int64 */
};

enum { CLASSES = 12, LANES = 16, PIECE = 512, VALUE_EXPONENTS = 32, VALUE_BELOW = 8 };

typedef struct {
    const uint8_t *base;
    uint8_t *out;        /* written by decode */
    const uint8_t *next; /* read by encode */
    size_t count;        /* elements */
} Segment;

static inline uint64_t load(const uint8_t *at, int width)
{
    switch (width) {
    case 1: return *at;
    case 2: { uint16_t v; memcpy(&v, at, 2); return v; }
    case 4: { uint32_t v; memcpy(&v, at, 4); return v; }
    default: { uint64_t v; memcpy(&v, at, 8); return v; }
    }
}

static inline void store(uint8_t *at, int width, uint64_t value)
{
    switch (width) {
    case 1: *at = (uint8_t)value; break;
    case 2: { uint16_t v = (uint16_t)value; memcpy(at, &v, 2); break; }
    case 4: { uint32_t v = (uint32_t)value; memcpy(at, &v, 4); break; }
    default: memcpy(at, &value, 8);
    }
}

/* Bits as unsigned integers in the order of the values: a bijection of 0 .. 2^(8 width) - 1. Signs are as
 * likely as not: no branch on them. */
static inline uint64_t to_order(uint64_t bits, Type type)
{
    int top = 8 * type.width - 1;
    uint64_t sign = (uint64_t)1 << top, negative = type.is_float ? (uint64_t)0 - (bits >> top) : 0;
    return (bits ^ (negative | sign)) & (sign | (sign - 1));
}

static inline uint64_t from_order(uint64_t order, Type type)
{
    int top = 8 * type.width - 1;
    uint64_t sign = (uint64_t)1 << top, positive = order >> top & 1;
    uint64_t negative = type.is_float ? positive - 1 : 0;
    return (order ^ (negative | sign)) & (sign | (sign - 1));
}

static inline int exponent_of(uint64_t bits, Type type)
{
    return (int)((bits >> type.shift) & type.mask);
}

static inline int class_of(int exponent, int lowest)
{
    int k = exponent - lowest;
    return k < 0 ? 0 : k >= CLASSES ? CLASSES - 1 : k;
}

static inline int value_exponent(int exponent, int lowest)
{
    int k = exponent - lowest + VALUE_BELOW;
    return k < 0 ? 0 : k >= VALUE_EXPONENTS ? VALUE_EXPONENTS - 1 : k;
}

/* --- adaptive tables --------------------------------------------------------------------------- */

enum {
    SCALE_BITS = 14,
    SCALE = 1 << SCALE_BITS,
    MOST_SYMBOLS = 128,
    LOOKUP_BITS = 7,
    COUNT_STEP = 32,
    FIRST_REBUILD = 16,
    LAST_REBUILD = 512,
    COUNT_LIMIT = 1 << 18
};

typedef struct {
    uint32_t counts[MOST_SYMBOLS];
    uint16_t starts[MOST_SYMBOLS + 1];
    uint8_t lookup[1 << LOOKUP_BITS];
    int symbols; /* 0: not begun */
    int left;  /* until the next rebuild */
    int pause; /* between rebuilds; doubles */
} Table;

static __attribute__((noinline)) void rebuild(Table *t, uint32_t total)
{
    uint32_t spread = SCALE - (uint32_t)t->symbols, given = 0, most = 0;
    int largest = 0;
    uint32_t widths[MOST_SYMBOLS];
    uint64_t share = ((uint64_t)spread << 32) / total;
    for (int i = 0; i < t->symbols; i++) {
        widths[i] = 1 + (uint32_t)((t->counts[i] * share) >> 32);
        given += widths[i];
        if (t->counts[i] > most) {
            most = t->counts[i];
            largest = i;
        }
    }
    widths[largest] += SCALE - given;
    uint32_t at = 0;
    int next = 0;
    for (int i = 0; i < t->symbols; i++) {
        t->starts[i] = (uint16_t)at;
        at += widths[i];
        while (next < 1 << LOOKUP_BITS && ((uint32_t)next << (SCALE_BITS - LOOKUP_BITS)) < at)
            t->lookup[next++] = (uint8_t)i;
    }
    t->starts[t->symbols] = SCALE;
}

static uint32_t total_of(const Table *t)
{
    uint32_t total = 0;
    for (int i = 0; i < t->symbols; i++)
        total += t->counts[i];
    return total;
}

static void begin_table(Table *t, int symbols)
{
    t->symbols = symbols;
    t->pause = FIRST_REBUILD;
    t->left = t->pause;
    rebuild(t, total_of(t));
}

static __attribute__((noinline)) void relearn(Table *t)
{
    uint32_t total = total_of(t);
    if (total > COUNT_LIMIT) {
        for (int i = 0; i < t->symbols; i++)
            t->counts[i] = (t->counts[i] >> 1) | 1;
        total = total_of(t);
    }
    rebuild(t, total);
    if (t->pause < LAST_REBUILD)
        t->pause *= 2;
    t->left = t->pause;
}

static inline void learn(Table *t, int symbol)
{
    t->counts[symbol] += COUNT_STEP;
    if (--t->left == 0)
        relearn(t);
}

/* --- rANS: words of 16 bits, two states of 32 ----------------------------------------------------
 *
 * Two states that share their words, because a processor can work on two at a time (interleaved rANS, Giesen 2014):
 * gaps take turns, then sizes are told by the one, signs by the other. Bits that are as likely as not lie apart, and are
 * read from the end backwards; the words are read from the beginning on. They meet.
 */

#define STATE_LOW ((uint32_t)1 << 16)
enum { SIGN_RATE = 6, ONE_RATE = 5, STATES = 2, SIZES = 0, SIGNS = 1 };

typedef struct {
    uint32_t *ops; /* start | (width - 1) << 16 | state << 31, in the order of decoding */
    size_t count, room;
    uint8_t *bits; /* in the order of decoding: the highest bit of a byte first */
    size_t bit_count, bit_room; /* the room in bytes */
    int failed;
} Writer;

static void put(Writer *w, int state, uint32_t start, uint32_t width)
{
    if (w->count == w->room) {
        size_t room = w->room ? 2 * w->room : 4096;
        uint32_t *ops = realloc(w->ops, room * sizeof *ops);
        if (ops == NULL) {
            w->failed = 1;
            w->count = 0;
            return;
        }
        w->ops = ops;
        w->room = room;
    }
    w->ops[w->count++] = start | (width - 1) << 16 | (uint32_t)state << 31;
}

static void put_symbol(Writer *w, int state, Table *t, int symbol)
{
    put(w, state, t->starts[symbol], (uint32_t)t->starts[symbol + 1] - t->starts[symbol]);
    learn(t, symbol);
}

/* Never 0 and never SCALE: what is left of either side is at least 2^rate - 1. */
static inline uint16_t follow_bit(uint32_t zeros, uint32_t bit, int rate)
{
    uint32_t up = (SCALE - zeros) >> rate, down = zeros >> rate, mask = 0 - bit;
    return (uint16_t)(zeros + (up & ~mask) - (down & mask));
}

static void put_bit(Writer *w, int state, uint16_t *middle, int bit, int rate)
{
    uint32_t zeros = *middle;
    put(w, state, bit ? zeros : 0, bit ? SCALE - zeros : zeros);
    *middle = follow_bit(zeros, (uint32_t)bit, rate);
}

static void put_bits(Writer *w, uint64_t value, int bits)
{
    if (w->bit_count + 64 > 8 * w->bit_room) {
        size_t room = w->bit_room ? 2 * w->bit_room : 4096;
        uint8_t *more = realloc(w->bits, room);
        if (more == NULL) {
            w->failed = 1;
            w->bit_count = 0;
            return;
        }
        memset(more + w->bit_room, 0, room - w->bit_room);
        w->bits = more;
        w->bit_room = room;
    }
    while (bits > 0) {
        int free_bits = 8 - (int)(w->bit_count & 7), some = bits < free_bits ? bits : free_bits;
        uint64_t part = value >> (bits - some) & ((1u << some) - 1);
        w->bits[w->bit_count >> 3] |= (uint8_t)(part << (free_bits - some));
        w->bit_count += (size_t)some;
        bits -= some;
    }
}

typedef struct {
    const uint8_t *words, *end; /* the next word; where the payload ends */
    uint64_t bits;              /* how many were read, from the end */
    size_t length;              /* of the payload */
    uint32_t state[STATES];
    int over;                   /* read past the other end */
} Reader;

/* Whether a word is needed is hard to foresee where symbols are long, so no branch on it; after a bit it is rare. */
static inline __attribute__((always_inline)) uint32_t
advance(Reader *r, uint32_t state, uint32_t start, uint32_t width, int rare)
{
    state = width * (state >> SCALE_BITS) + (state & (SCALE - 1)) - start;
    uint32_t need = state < STATE_LOW;
    if (rare && __builtin_expect(!need, 1))
        return state;
    if (r->end - r->words < 2) {
        r->over |= (int)need;
        return state;
    }
    uint32_t word = (uint32_t)load(r->words, 2);
    r->words += 2 * need;
    return state << (16 * need) | (word & (0 - need));
}

/* Up to 56 bits. */
static inline __attribute__((always_inline)) uint64_t
get_bits(Reader *r, int bits)
{
    size_t skip = (size_t)(r->bits >> 3);
    if (skip + 8 > r->length) {
        r->over = 1;
        return 0;
    }
    uint64_t eight = load(r->end - 8 - skip, 8) << (r->bits & 7);
    r->bits += (uint64_t)bits;
    return eight >> 1 >> (63 - bits);
}

static inline __attribute__((always_inline)) int
get_symbol(Reader *r, uint32_t *state, Table *t)
{
    uint32_t slot = *state & (SCALE - 1);
    int symbol = t->lookup[slot >> (SCALE_BITS - LOOKUP_BITS)];
    while (t->starts[symbol + 1] <= slot)
        symbol++;
    *state = advance(r, *state, t->starts[symbol], (uint32_t)t->starts[symbol + 1] - t->starts[symbol], 0);
    learn(t, symbol);
    return symbol;
}

/* A bit, as likely as not: no branch on it. `middle` is the share of zeros, and follows them. */
static inline __attribute__((always_inline)) int
get_bit(Reader *r, uint32_t *state, uint16_t *middle, int rate)
{
    uint32_t zeros = *middle, slot = *state & (SCALE - 1), bit = slot >= zeros, mask = 0 - bit;
    *state = advance(r, *state, zeros & mask, (zeros ^ mask) + ((SCALE + 1) & mask), 1);
    *middle = follow_bit(zeros, bit, rate);
    return (int)bit;
}

/* --- the model: what both sides know -------------------------------------------------------------- */

enum {
    SUB_BITS = 2, /* buckets of gaps: four to the octave */
    CONTEXTS = 48, /* expected gaps: two to the octave */
    SMALL_VALUES = 8,
    SIGN_CONTEXTS = 16,
    VALUE_SYMBOLS = SMALL_VALUES + 60, /* sizes 2 to 8, then by the highest bit, 3 to 63 */
    ONE = 1 << 16,
    OWN_RATE = ONE / 50
};

typedef struct {
    Table gaps[CONTEXTS];
    Table values[VALUE_EXPONENTS];
    uint16_t signs[SIGN_CONTEXTS]; /* shares of ups, by the signs before */
    uint16_t ones[VALUE_EXPONENTS]; /* shares of steps by one, by the exponent */
    int last;              /* signs of the last changes, the latest one lowest; 1 for down */
    int first;             /* the expected gap of the lowest class, before any is known */
    int gap_symbols;       /* the last one: no further change */
} Model;

/* What the gaps of a class teach. The last one but one counts, so that two can be decoded at a time. */
typedef struct {
    int64_t mean; /* log2 of the gap, 16 fractional bits */
    uint32_t seen;
    int context, next;
} Course;

static const uint32_t LOG2_FRACTION[65] = {
    0, 1466, 2909, 4331, 5732, 7112, 8473, 9814,
    11136, 12440, 13727, 14996, 16248, 17484, 18704, 19909,
    21098, 22272, 23433, 24579, 25711, 26830, 27936, 29029,
    30109, 31178, 32234, 33279, 34312, 35334, 36346, 37346,
    38336, 39316, 40286, 41246, 42196, 43137, 44068, 44990,
    45904, 46809, 47705, 48593, 49472, 50344, 51207, 52063,
    52911, 53751, 54584, 55410, 56229, 57040, 57845, 58643,
    59434, 60219, 60997, 61769, 62534, 63294, 64047, 64794,
    65536,
};

/* log2(y / 2), 16 fractional bits; linear between 64 points to the octave. */
static int64_t log2_of_half(uint64_t twice)
{
    int top = 63 - __builtin_clzll(twice);
    uint64_t fraction = top >= 22 ? twice >> (top - 22) : twice << (22 - top);
    fraction &= (1u << 22) - 1;
    uint32_t index = (uint32_t)(fraction >> 16), rest = (uint32_t)(fraction & 0xffff);
    uint32_t low = LOG2_FRACTION[index], high = LOG2_FRACTION[index + 1];
    return (int64_t)(top - 1) * ONE + low + (((int64_t)(high - low) * rest) >> 16);
}

static int32_t bucket_logs[MOST_SYMBOLS]; /* of the middle of each bucket; filled by prepare */
static int32_t rates[50];

/* x / 2^bits, rounded down (as GCC and clang shift; C leaves it to them). */
static inline int64_t floor_shift(int64_t x, int bits)
{
    return x >> bits;
}

static inline int bucket_of(uint64_t gap, int *extra)
{
    uint64_t v = gap + (1u << SUB_BITS);
    int top = 63 - __builtin_clzll(v);
    *extra = top - SUB_BITS;
    return (top - SUB_BITS) << SUB_BITS | (int)((v >> *extra) & ((1u << SUB_BITS) - 1));
}

static inline uint64_t bucket_start(int symbol, int *extra)
{
    int top = (symbol >> SUB_BITS) + SUB_BITS;
    *extra = top - SUB_BITS;
    uint64_t lead = (1u << SUB_BITS) | (uint64_t)(symbol & ((1 << SUB_BITS) - 1));
    return (lead << *extra) - (1u << SUB_BITS);
}

/* base^exponent for a base below one with 32 fractional bits. */
static uint64_t power(uint64_t base, uint64_t exponent)
{
    uint64_t result = (uint64_t)1 << 32;
    while (exponent) {
        if (exponent & 1)
            result = (result * base) >> 32;
        base = (base * base) >> 32;
        exponent >>= 1;
    }
    return result;
}

/* Before anything is known: gaps of changes that fall independently, at the rate of the context. */
static __attribute__((noinline)) void begin_gaps(Table *t, int context, int symbols)
{
    /* E log2(gap) of a geometric gap with mean m is log2(m) - 0.83 */
    int quarter = 2 * context + 3;
    static const uint32_t ROOT[4] = {65536, 77936, 92682, 110218}; /* 2^(i/4) */
    uint64_t mean = ((uint64_t)ROOT[quarter & 3] << (quarter >> 2)) >> 8; /* 8 fractional bits */
    uint64_t stay = ((uint64_t)1 << 32) - ((uint64_t)1 << 40) / (mean + 256);
    uint64_t from = (uint64_t)1 << 32;
    for (int i = 0; i < symbols; i++) {
        int extra;
        uint64_t until = 0;
        if (i + 2 < symbols)
            until = power(stay, bucket_start(i + 1, &extra));
        t->counts[i] = i + 1 < symbols ? 1 + (uint32_t)(((from - until) * 400 * COUNT_STEP) >> 32) : 1;
        from = until;
    }
    begin_table(t, symbols);
}

static inline int context_of(int64_t mean)
{
    int64_t context = floor_shift(mean + ONE / 4, 15);
    return context < 0 ? 0 : context >= CONTEXTS ? CONTEXTS - 1 : (int)context;
}

static inline Table *gap_table(Model *m, int context)
{
    if (m->gaps[context].symbols == 0)
        begin_gaps(&m->gaps[context], context, m->gap_symbols);
    return &m->gaps[context];
}

static inline Table *value_table(Model *m, int exponent)
{
    Table *t = &m->values[exponent];
    if (t->symbols == 0) {
        for (int i = 0; i < VALUE_SYMBOLS; i++)
            t->counts[i] = i < SMALL_VALUES ? 8 : 1;
        begin_table(t, VALUE_SYMBOLS);
    }
    return t;
}

static void begin_model(Model *m, uint64_t elements, int first)
{
    int extra;
    memset(m, 0, sizeof *m);
    m->gap_symbols = bucket_of(elements, &extra) + 2;
    m->first = first;
    for (int k = 0; k < SIGN_CONTEXTS; k++)
        m->signs[k] = SCALE / 2;
    for (int k = 0; k < VALUE_EXPONENTS; k++)
        m->ones[k] = SCALE - SCALE / 8;
}

static void begin_course(Course *c, const Model *m, int class)
{
    c->mean = (int64_t)m->first * (ONE / 4) + (int64_t)class * ONE;
    c->seen = 0;
    c->context = c->next = context_of(c->mean);
}

static inline void learn_gap(Course *c, int symbol)
{
    int64_t own = bucket_logs[symbol] - c->mean;
    c->seen += c->seen < 49;
    c->context = c->next;
    c->mean += floor_shift(own * rates[c->seen], 16);
    c->next = context_of(c->mean);
}

static inline int follow_signs(int last, int negative)
{
    return (last << 1 | negative) & (SIGN_CONTEXTS - 1);
}

static inline int value_symbol(uint64_t size, int *bits, uint64_t *rest)
{
    int top = 63 - __builtin_clzll(size);
    *bits = size <= SMALL_VALUES ? 0 : top;
    *rest = size & (((uint64_t)1 << *bits) - 1);
    return size <= SMALL_VALUES ? (int)size - 2 : SMALL_VALUES - 4 + top;
}

enum { PORTABLE, WITH_AVX2, WITH_AVX512 };

static int path = PORTABLE; /* the best one there is, but for tests */

/* --- finding changes -------------------------------------------------------------------------- */

typedef struct {
    int64_t difference; /* never 0 */
    uint32_t gap;
    uint32_t following; /* the next event of its class */
    uint8_t class, exponent;
} Event;

typedef struct {
    Event *events;
    size_t count, room, most;
    int full; /* more changes than are worth coding this way, or no memory */
    _Alignas(64) uint32_t passed[LANES]; /* elements of the class until here */
    uint32_t past[LANES];  /* and until its last change, that one included */
} Finder;

static int add_event(Finder *f, Event event)
{
    if (f->count >= f->most) {
        f->full = 1;
        return 0;
    }
    if (f->count == f->room) {
        size_t room = f->room ? 2 * f->room : 4096;
        Event *events = realloc(f->events, room * sizeof *events);
        if (events == NULL) {
            f->full = 2;
            return 0;
        }
        f->events = events;
        f->room = room;
    }
    f->events[f->count++] = event;
    return 1;
}

static int64_t difference_of(uint64_t base, uint64_t next, Type type)
{
    uint64_t d = to_order(next, type) - to_order(base, type);
    uint64_t sign = (uint64_t)1 << (8 * type.width - 1);
    uint64_t all = sign | (sign - 1);
    d &= all;
    return (int64_t)(d & sign ? d | ~all : d);
}

static int find_one(Finder *f, uint64_t base, uint64_t next, int class, uint32_t count, Type type, int lowest)
{
    Event e;
    e.difference = difference_of(base, next, type);
    if (e.difference == 0) /* someone is writing to what we read; the digests will tell */
        e.difference = 1;
    e.gap = count - f->past[class];
    e.following = 0;
    e.class = (uint8_t)class;
    e.exponent = (uint8_t)value_exponent(exponent_of(base, type), lowest);
    f->past[class] = count + 1;
    return add_event(f, e);
}

/* Within a piece events come by class: the decoder finds them so. */
static void sort_piece(Finder *f, size_t from)
{
    Event held[PIECE], *events = f->events + from;
    size_t count = f->count - from, at[CLASSES] = {0}, start = 0;
    if (count < 2)
        return;
    memcpy(held, events, count * sizeof *held);
    for (size_t i = 0; i < count; i++)
        at[held[i].class]++;
    for (int k = 0; k < CLASSES; k++) {
        size_t size = at[k];
        at[k] = start;
        start += size;
    }
    for (size_t i = 0; i < count; i++)
        events[at[held[i].class]++] = held[i];
}

static inline int find_some(Finder *f, const uint8_t *base, const uint8_t *next, size_t count, Type type, int lowest)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t b = load(base + i * type.width, type.width);
        uint64_t n = load(next + i * type.width, type.width);
        int class = class_of(exponent_of(b, type), lowest);
        if (b != n && !find_one(f, b, n, class, f->passed[class], type, lowest))
            return 0;
        f->passed[class]++;
    }
    return 1;
}

static inline void find_portable(Finder *f, const uint8_t *base, const uint8_t *next, size_t count,
                                 Type type, int lowest)
{
    for (size_t i = 0; i < count; i += PIECE) {
        size_t from = f->count, some = count - i < PIECE ? count - i : PIECE;
        if (!find_some(f, base + i * type.width, next + i * type.width, some, type, lowest))
            return;
        sort_piece(f, from);
    }
}

#if HAVE_AVX2_PATH
#define AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))

/* Blocks of 64 elements: a bit for each, the first one lowest. */
enum { BLOCK = 64 };

AVX2 static inline __m256i load_avx2(const uint8_t *at)
{
    return _mm256_loadu_si256((const __m256i *)at);
}

/* The order of dwords that four packed vectors come in, and back. */
#define PACKED_FOURS _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)
#define UNPACKED_FOURS _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)

/* The classes of 32 elements as bytes, in memory order. */
AVX2 static inline __attribute__((always_inline)) __m256i
classes_avx2(const uint8_t *at, Type type, int lowest)
{
    const __m256i top = _mm256_set1_epi8(CLASSES - 1), low = _mm256_set1_epi8((char)lowest);
    const __m128i shift = _mm_cvtsi32_si128(type.shift);
    __m256i v;
    if (type.width == 1) {
        v = _mm256_and_si256(_mm256_srl_epi16(load_avx2(at), shift),
                             _mm256_set1_epi8((char)type.mask));
    } else if (type.width == 2) {
        const __m256i mask = _mm256_set1_epi16((short)type.mask);
        __m256i a = _mm256_and_si256(_mm256_srl_epi16(load_avx2(at), shift), mask);
        __m256i b = _mm256_and_si256(_mm256_srl_epi16(load_avx2(at + 32), shift), mask);
        v = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
    } else {
        const __m256i mask = _mm256_set1_epi32((int)type.mask);
        __m256i a = _mm256_and_si256(_mm256_srl_epi32(load_avx2(at), shift), mask);
        __m256i b = _mm256_and_si256(_mm256_srl_epi32(load_avx2(at + 32), shift), mask);
        __m256i c = _mm256_and_si256(_mm256_srl_epi32(load_avx2(at + 64), shift), mask);
        __m256i d = _mm256_and_si256(_mm256_srl_epi32(load_avx2(at + 96), shift), mask);
        v = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
        v = _mm256_permutevar8x32_epi32(v, PACKED_FOURS);
    }
    return _mm256_min_epu8(_mm256_subs_epu8(v, low), top);
}

/* For each class, which of 64 elements are of it. */
AVX2 static inline __attribute__((always_inline)) void
members_avx2(const uint8_t *at, Type type, int lowest, uint64_t of[LANES])
{
    __m256i low = classes_avx2(at, type, lowest);
    __m256i high = classes_avx2(at + 32 * type.width, type, lowest);
    uint64_t bit[4];
    for (int k = 0; k < 4; k++) {
        const __m128i up = _mm_cvtsi32_si128(7 - k);
        uint32_t a = (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(low, up));
        uint32_t b = (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(high, up));
        bit[k] = a | (uint64_t)b << 32;
    }
    uint64_t fours[3] = {~bit[3] & ~bit[2], ~bit[3] & bit[2], bit[3]}; /* classes end at 11 */
    uint64_t ones[4] = {~bit[1] & ~bit[0], ~bit[1] & bit[0], bit[1] & ~bit[0], bit[1] & bit[0]};
    for (int k = 0; k < CLASSES; k++)
        of[k] = fours[k >> 2] & ones[k & 3];
}

static inline uint64_t count_bits(uint64_t bits)
{
    return (uint64_t)__builtin_popcountll(bits);
}

/* The sizes of eight sets. */
AVX2 static inline __attribute__((always_inline)) __m256i sizes_avx2(const uint64_t *of)
{
    uint64_t a = count_bits(of[0]) | count_bits(of[1]) << 16 | count_bits(of[2]) << 32 | count_bits(of[3]) << 48;
    uint64_t b = count_bits(of[4]) | count_bits(of[5]) << 16 | count_bits(of[6]) << 32 | count_bits(of[7]) << 48;
    return _mm256_cvtepu16_epi32(_mm_set_epi64x((int64_t)b, (int64_t)a));
}

AVX2 static inline __attribute__((always_inline)) __m256i
equal_avx2(const uint8_t *base, const uint8_t *next, int width)
{
    if (width == 1)
        return _mm256_cmpeq_epi8(load_avx2(base), load_avx2(next));
    if (width == 2) {
        __m256i a = _mm256_cmpeq_epi16(load_avx2(base), load_avx2(next));
        __m256i b = _mm256_cmpeq_epi16(load_avx2(base + 32), load_avx2(next + 32));
        return _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8);
    }
    __m256i a = _mm256_cmpeq_epi32(load_avx2(base), load_avx2(next));
    __m256i b = _mm256_cmpeq_epi32(load_avx2(base + 32), load_avx2(next + 32));
    __m256i c = _mm256_cmpeq_epi32(load_avx2(base + 64), load_avx2(next + 64));
    __m256i d = _mm256_cmpeq_epi32(load_avx2(base + 96), load_avx2(next + 96));
    __m256i v = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    return _mm256_permutevar8x32_epi32(v, PACKED_FOURS);
}

/* Which of 64 elements changed. */
AVX2 static inline __attribute__((always_inline)) uint64_t
changed_avx2(const uint8_t *base, const uint8_t *next, int width)
{
    size_t half = 32 * (size_t)width;
    uint32_t low = (uint32_t)_mm256_movemask_epi8(equal_avx2(base, next, width));
    uint32_t high = (uint32_t)_mm256_movemask_epi8(equal_avx2(base + half, next + half, width));
    return ~(low | (uint64_t)high << 32);
}

#if HAVE_AVX512_PATH
#define AVX512 __attribute__((target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vpopcntdq,gfni")))

/* Masks as numbers, by the instruction itself: GCC 12 was seen to store a mask of 16 bits to the stack and
 * to load 32 (-O1 with sanitizers), whose upper half was what lay there. */
AVX512 static inline __attribute__((always_inline)) uint32_t number_of_16(__mmask16 mask)
{
    uint32_t number;
    __asm__("kmovw %1, %0" : "=r"(number) : "k"(mask));
    return number;
}

AVX512 static inline __attribute__((always_inline)) uint32_t number_of_32(__mmask32 mask)
{
    uint32_t number;
    __asm__("kmovd %1, %0" : "=r"(number) : "k"(mask));
    return number;
}

/* A piece: of each element the four bits of its class, and how many of each class there are. */
enum { BLOCKS = PIECE / BLOCK, BITS = 4 };

typedef struct {
    _Alignas(64) uint64_t bit[BITS][BLOCKS];
    _Alignas(64) uint64_t sizes[LANES]; /* by class: a byte for each block, the first one lowest; at most 64 */
    _Alignas(64) uint32_t begin[LANES]; /* elements of the class before the piece, */
    _Alignas(64) uint32_t end[LANES];   /* and until its end */
} Piece;

/* The classes of 64 elements as bytes. Those of 2 bytes come in another order: eights 0, 4, 1, 5, 2, 6, 3, 7. */
AVX512 static inline __attribute__((always_inline)) __m512i
classes_avx512(const uint8_t *at, Type type, int lowest)
{
    const __m512i top = _mm512_set1_epi8(CLASSES - 1), low = _mm512_set1_epi8((char)lowest);
    const __m128i shift = _mm_cvtsi32_si128(type.shift);
    __m512i v;
    if (type.width == 1) {
        v = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(at), shift),
                             _mm512_set1_epi8((char)type.mask));
    } else if (type.width == 2) {
        const __m512i mask = _mm512_set1_epi16((short)type.mask);
        __m512i a = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(at), shift), mask);
        __m512i b = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(at + 64), shift), mask);
        v = _mm512_packus_epi16(a, b);
    } else {
        const __m512i mask = _mm512_set1_epi32((int)type.mask);
        __m512i a = _mm512_and_si512(_mm512_srl_epi32(_mm512_loadu_si512(at), shift), mask);
        __m512i b = _mm512_and_si512(_mm512_srl_epi32(_mm512_loadu_si512(at + 64), shift), mask);
        __m512i c = _mm512_and_si512(_mm512_srl_epi32(_mm512_loadu_si512(at + 128), shift), mask);
        __m512i d = _mm512_and_si512(_mm512_srl_epi32(_mm512_loadu_si512(at + 192), shift), mask);
        v = _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
        v = _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
    }
    return _mm512_min_epu8(_mm512_subs_epu8(v, low), top);
}

/* Eight numbers of a byte each in each of eight rows: rows become columns. */
AVX512 static inline __attribute__((always_inline)) __m512i turn_bytes(__m512i rows, int width)
{
    const __m512i column = _mm512_setr_epi64(
        0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303,
        0x0404040404040404, 0x0505050505050505, 0x0606060606060606, 0x0707070707070707);
    const __m512i row = _mm512_set1_epi64(width == 2 ? 0x3828180830201000 : 0x3830282018100800);
    return _mm512_permutexvar_epi8(_mm512_or_si512(column, row), rows);
}

/* The four bits of the classes of two blocks: a row each for those of the first, then of the second. */
AVX512 static inline __attribute__((always_inline)) __m512i
two_blocks_avx512(const uint8_t *at, Type type, int lowest)
{
    const __m512i backwards = _mm512_set_epi64(
        0x08090a0b0c0d0e0f, 0x0001020304050607, 0x08090a0b0c0d0e0f, 0x0001020304050607,
        0x08090a0b0c0d0e0f, 0x0001020304050607, 0x08090a0b0c0d0e0f, 0x0001020304050607);
    __m512i first = classes_avx512(at, type, lowest);
    __m512i second = classes_avx512(at + BLOCK * type.width, type, lowest);
    __m512i both = _mm512_or_si512(first, _mm512_slli_epi16(second, 4));
    /* In each eight: bit i of byte j becomes bit j of byte i; as a matrix its last byte comes first. */
    both = _mm512_shuffle_epi8(both, backwards);
    both = _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64((int64_t)0x8040201008040201), both, 0);
    return turn_bytes(both, type.width);
}

/* The sizes of the intersections with four sets, a byte each. */
AVX512 static inline __attribute__((always_inline)) __m512i
size_of_four_avx512(__m512i set, const __m512i ones[4])
{
    __m512i a = _mm512_popcnt_epi64(_mm512_and_si512(set, ones[0]));
    __m512i b = _mm512_popcnt_epi64(_mm512_and_si512(set, ones[1]));
    __m512i c = _mm512_popcnt_epi64(_mm512_and_si512(set, ones[2]));
    __m512i d = _mm512_popcnt_epi64(_mm512_and_si512(set, ones[3]));
    a = _mm512_or_si512(a, _mm512_slli_epi64(b, 8));
    c = _mm512_or_si512(_mm512_slli_epi64(c, 16), _mm512_slli_epi64(d, 24));
    return _mm512_or_si512(a, c);
}

/* Take in the classes of a piece; return how many there are of each. */
AVX512 static inline __attribute__((always_inline)) __m512i
piece_avx512(Piece *p, const uint8_t *at, Type type, int lowest)
{
    const size_t two = 2 * BLOCK * (size_t)type.width;
    __m512i v = two_blocks_avx512(at, type, lowest), w = two_blocks_avx512(at + two, type, lowest);
    __m512i x = two_blocks_avx512(at + 2 * two, type, lowest), y = two_blocks_avx512(at + 3 * two, type, lowest);
    const __m512i zero_one = _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13);
    const __m512i two_three = _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15);
    __m512i e = _mm512_permutex2var_epi64(v, zero_one, w), f = _mm512_permutex2var_epi64(v, two_three, w);
    __m512i g = _mm512_permutex2var_epi64(x, zero_one, y), h = _mm512_permutex2var_epi64(x, two_three, y);
    __m512i a = _mm512_shuffle_i64x2(e, g, 0x44), b = _mm512_shuffle_i64x2(e, g, 0xee);
    __m512i c = _mm512_shuffle_i64x2(f, h, 0x44), d = _mm512_shuffle_i64x2(f, h, 0xee);
    _mm512_storeu_si512(p->bit[0], a);
    _mm512_storeu_si512(p->bit[1], b);
    _mm512_storeu_si512(p->bit[2], c);
    _mm512_storeu_si512(p->bit[3], d);
    const __m512i all = _mm512_set1_epi64(-1);
    __m512i ones[4] = {
        _mm512_andnot_si512(_mm512_or_si512(a, b), all),
        _mm512_andnot_si512(b, a),
        _mm512_andnot_si512(a, b),
        _mm512_and_si512(a, b),
    };
    __m512i fours[3] = {_mm512_andnot_si512(_mm512_or_si512(c, d), all), _mm512_andnot_si512(d, c), d};
    __m512i low = size_of_four_avx512(fours[0], ones), high = size_of_four_avx512(fours[2], ones);
    low = _mm512_or_si512(low, _mm512_slli_epi64(size_of_four_avx512(fours[1], ones), 32));
    low = turn_bytes(low, 1); /* rows of blocks become rows of classes */
    high = turn_bytes(high, 1);
    _mm512_storeu_si512(p->sizes, low);
    _mm512_storeu_si512(p->sizes + 8, high);
    __m256i of_low = _mm512_cvtepi64_epi32(_mm512_sad_epu8(low, _mm512_setzero_si512()));
    __m256i of_high = _mm512_cvtepi64_epi32(_mm512_sad_epu8(high, _mm512_setzero_si512()));
    return _mm512_inserti64x4(_mm512_castsi256_si512(of_low), of_high, 1);
}

/* Which elements of a block are of a class. */
static inline uint64_t members_of(const Piece *p, int block, int class)
{
    uint64_t not0 = (uint64_t)(class & 1) - 1, not1 = (uint64_t)(class >> 1 & 1) - 1;
    uint64_t not2 = (uint64_t)(class >> 2 & 1) - 1, not3 = (uint64_t)(class >> 3 & 1) - 1;
    return (p->bit[0][block] ^ not0) & (p->bit[1][block] ^ not1) & (p->bit[2][block] ^ not2)
           & (p->bit[3][block] ^ not3);
}

AVX512 static inline __attribute__((always_inline)) uint64_t
changed_avx512(const uint8_t *base, const uint8_t *next, int width)
{
    uint64_t changed = 0;
    for (int k = 0; k < width; k++) {
        __m512i b = _mm512_loadu_si512(base + 64 * k), n = _mm512_loadu_si512(next + 64 * k);
        if (width == 1)
            changed = _mm512_cmpneq_epi8_mask(b, n);
        else if (width == 2)
            changed |= (uint64_t)number_of_32(_mm512_cmpneq_epi16_mask(b, n)) << (32 * k);
        else
            changed |= (uint64_t)number_of_16(_mm512_cmpneq_epi32_mask(b, n)) << (16 * k);
    }
    return changed;
}

/* The sum of the first `blocks` bytes, fewer than eight. */
AVX512 static inline uint32_t sum_before(uint64_t bytes, int blocks)
{
    __m128i some = _mm_cvtsi64_si128((int64_t)_bzhi_u64(bytes, 8 * (uint32_t)blocks));
    return (uint32_t)_mm_cvtsi128_si32(_mm_sad_epu8(some, _mm_setzero_si128()));
}

/* Find what changed in whole pieces; return how many elements these are. */
AVX512 static inline __attribute__((always_inline)) size_t
find_avx512(Finder *f, const uint8_t *base, const uint8_t *next, size_t count, Type type, int lowest)
{
    size_t i = 0;
    Piece p;
    __m512i passed = _mm512_loadu_si512(f->passed);
    for (; i + PIECE <= count; i += PIECE) {
        const uint8_t *b = base + i * (size_t)type.width, *n = next + i * (size_t)type.width;
        size_t from = f->count;
        __m512i sizes = piece_avx512(&p, b, type, lowest);
        _mm512_storeu_si512(f->passed, passed);
        for (int j = 0; j < BLOCKS; j++) {
            size_t skip = (size_t)j * BLOCK * (size_t)type.width;
            uint64_t changed = changed_avx512(b + skip, n + skip, type.width);
            for (; changed; changed &= changed - 1) {
                int bit = __builtin_ctzll(changed);
                uint64_t old = load(b + skip + bit * type.width, type.width);
                uint64_t new = load(n + skip + bit * type.width, type.width);
                int class = class_of(exponent_of(old, type), lowest);
                uint64_t earlier = members_of(&p, j, class) & (((uint64_t)1 << bit) - 1);
                uint32_t before = sum_before(p.sizes[class], j) + (uint32_t)count_bits(earlier);
                if (!find_one(f, old, new, class, f->passed[class] + before, type, lowest))
                    return count;
            }
        }
        sort_piece(f, from);
        passed = _mm512_add_epi32(passed, sizes);
    }
    _mm512_storeu_si512(f->passed, passed);
    return i;
}

AVX512 static size_t find_segment_avx512(Finder *f, const Segment *s, Type type, int lowest)
{
    switch (type.width) { /* a constant width makes a tight loop */
    case 1: type.width = 1; return find_avx512(f, s->base, s->next, s->count, type, lowest);
    case 2: type.width = 2; return find_avx512(f, s->base, s->next, s->count, type, lowest);
    default: type.width = 4; return find_avx512(f, s->base, s->next, s->count, type, lowest);
    }
}
#endif

/* The changes of a block. */
AVX2 static int find_block_avx2(Finder *f, const uint8_t *b, const uint8_t *n, uint64_t changed,
                                const uint64_t *of, Type type, int lowest)
{
    while (changed) {
        int bit = __builtin_ctzll(changed);
        changed &= changed - 1;
        uint64_t old = load(b + bit * type.width, type.width);
        uint64_t new = load(n + bit * type.width, type.width);
        int class = class_of(exponent_of(old, type), lowest);
        uint32_t before = (uint32_t)count_bits(of[class] & (((uint64_t)1 << bit) - 1));
        if (!find_one(f, old, new, class, f->passed[class] + before, type, lowest))
            return 0;
    }
    return 1;
}

AVX2 static inline __attribute__((always_inline)) void
find_avx2(Finder *f, const uint8_t *base, const uint8_t *next, size_t count, Type type, int lowest)
{
    size_t from = f->count;
    for (size_t i = 0; i < count; i += BLOCK) {
        const uint8_t *b = base + i * (size_t)type.width, *n = next + i * (size_t)type.width;
        uint64_t of[LANES] = {0};
        if (i % PIECE == 0) {
            sort_piece(f, from);
            from = f->count;
        }
        if (count - i < BLOCK) {
            if (!find_some(f, b, n, count - i, type, lowest))
                return;
            continue;
        }
        uint64_t changed = changed_avx2(b, n, type.width);
        members_avx2(b, type, lowest, of);
        if (changed && !find_block_avx2(f, b, n, changed, of, type, lowest))
            return;
        __m256i *low = (__m256i *)f->passed, *high = low + 1;
        _mm256_storeu_si256(low, _mm256_add_epi32(_mm256_loadu_si256(low), sizes_avx2(of)));
        _mm256_storeu_si256(high, _mm256_add_epi32(_mm256_loadu_si256(high), sizes_avx2(of + 8)));
    }
    sort_piece(f, from);
}

AVX2 static void find_segment_avx2(Finder *f, const Segment *s, Type type, int lowest)
{
    size_t done = 0;
#if HAVE_AVX512_PATH
    if (path >= WITH_AVX512)
        done = find_segment_avx512(f, s, type, lowest);
#endif
    const uint8_t *b = s->base + done * (size_t)type.width, *n = s->next + done * (size_t)type.width;
    size_t left = s->count - done;
    switch (type.width) {
    case 1: type.width = 1; find_avx2(f, b, n, left, type, lowest); break;
    case 2: type.width = 2; find_avx2(f, b, n, left, type, lowest); break;
    default: type.width = 4; find_avx2(f, b, n, left, type, lowest);
    }
}
#endif


static void find(Finder *f, const Segment *s, size_t segments, Type type, int lowest)
{
    for (size_t i = 0; i < segments && !f->full; i++) {
#if HAVE_AVX2_PATH
        if (path >= WITH_AVX2 && type.width <= 4)
            find_segment_avx2(f, &s[i], type, lowest);
        else
#endif
        switch (type.width) { /* a constant width makes a tight loop */
        case 1: type.width = 1; find_portable(f, s[i].base, s[i].next, s[i].count, type, lowest); break;
        case 2: type.width = 2; find_portable(f, s[i].base, s[i].next, s[i].count, type, lowest); break;
        case 4: type.width = 4; find_portable(f, s[i].base, s[i].next, s[i].count, type, lowest); break;
        default: type.width = 8; find_portable(f, s[i].base, s[i].next, s[i].count, type, lowest);
        }
    }
}

/* --- coding changes ----------------------------------------------------------------------------- */

/* The gaps of a class, up to the one that says that no change follows. */
static void put_gaps(Writer *w, Model *m, const Finder *f, int class, size_t event)
{
    Course c;
    begin_course(&c, m, class);
    for (; event < f->count; event = f->events[event].following) {
        uint32_t gap = f->events[event].gap;
        int extra, symbol = bucket_of(gap, &extra);
        put_symbol(w, (int)(w->count & 1), gap_table(m, c.context), symbol);
        put_bits(w, gap + (1u << SUB_BITS), extra);
        learn_gap(&c, symbol);
    }
    put_symbol(w, (int)(w->count & 1), gap_table(m, c.context), m->gap_symbols - 1);
}

static void put_value(Writer *w, Model *m, const Event *event)
{
    int bits, negative = event->difference < 0;
    uint64_t rest = 0, d = (uint64_t)event->difference, size = negative ? (uint64_t)0 - d : d;
    put_bit(w, SIZES, &m->ones[event->exponent], size > 1, ONE_RATE);
    if (size > 1) {
        put_symbol(w, SIZES, value_table(m, event->exponent), value_symbol(size, &bits, &rest));
        put_bits(w, rest, bits);
    }
    put_bit(w, SIGNS, &m->signs[m->last], negative, SIGN_RATE);
    m->last = follow_signs(m->last, negative);
}

/* Write what decode reads: the gaps of each class, then the values in the order of the elements. */
static int write_events(Writer *w, Model *m, Finder *f)
{
    size_t first[CLASSES];
    for (int k = 0; k < CLASSES; k++)
        first[k] = f->count;
    for (size_t i = f->count; i-- > 0;) {
        f->events[i].following = (uint32_t)first[f->events[i].class];
        first[f->events[i].class] = i;
    }
    for (int k = 0; k < CLASSES && !w->failed; k++)
        put_gaps(w, m, f, k, first[k]);
    for (size_t i = 0; i < f->count && !w->failed; i++)
        put_value(w, m, &f->events[i]);
    return !w->failed;
}

static inline uint32_t coded(uint32_t state, uint32_t op)
{
    uint32_t start = op & 0xffff, width = (op >> 16) + 1;
    return ((state / width) << SCALE_BITS) + state % width + start;
}

static inline int is_full(uint32_t state, uint32_t op)
{
    return state >= (uint64_t)(STATE_LOW >> SCALE_BITS << 16) * ((op >> 16) + 1);
}

/* Code the operations, the last one first; return the bytes after `head` free ones, or NULL. */
static uint8_t *finish(const Writer *w, size_t head, size_t *length)
{
    size_t of_bits = (w->bit_count + 7) / 8, room = head + 4 * STATES + 2 * w->count + of_bits;
    uint8_t *bytes = malloc(room);
    if (bytes == NULL)
        return NULL;
    uint8_t *end = bytes + room, *at = end;
    uint32_t state[STATES] = {STATE_LOW, STATE_LOW};
    for (size_t i = w->count; i-- > 0;) {
        uint32_t op = w->ops[i] & 0x7fffffff, *own = &state[w->ops[i] >> 31];
        if (is_full(*own, op)) {
            at -= 2;
            store(at, 2, *own);
            *own >>= 16;
        }
        *own = coded(*own, op);
    }
    for (int k = STATES; k-- > 0;) {
        at -= 4;
        store(at, 4, state[k]);
    }
    size_t of_words = (size_t)(end - at);
    memmove(bytes + head, at, of_words);
    *length = head + of_words + of_bits;
    for (size_t i = 0; i < of_bits; i++)
        bytes[*length - 1 - i] = w->bits[i];
    return bytes;
}

/* --- applying changes ---------------------------------------------------------------------------- */

#define NEVER ((uint32_t)1 << 30) /* more elements than a frame has */

enum { MOST_CHANGES = 3 << 20, ENOUGH = 64, PLACES = ENOUGH + PIECE };

typedef struct {
    Reader *reader;
    Model *model;
    Type type;
    int lowest;
    uint32_t *due;          /* which elements of each class change, counted within it; each closed by NEVER */
    size_t dues, room;
    const uint32_t *later[CLASSES]; /* what comes after the one in `next` */
    _Alignas(64) uint32_t next[LANES];   /* which element of the class changes next */
    _Alignas(64) uint32_t passed[LANES];  /* elements of the class until here */
    size_t placed;          /* changes whose values are not read yet: few enough to find them in the cache */
    uint32_t places[PLACES];
} Applier;

static int more_room(Applier *a)
{
    size_t room = a->room ? 2 * a->room : 4096;
    uint32_t *due = realloc(a->due, room * sizeof *due);
    if (due == NULL)
        return 0;
    a->due = due;
    a->room = room;
    return 1;
}

/* Read the gaps of all classes. Return 0, or -1 without memory, or 1 for what encode never wrote. */
static int read_gaps(Applier *a, uint64_t elements)
{
    Reader r = *a->reader;
    Model *m = a->model;
    uint32_t now = r.state[0], then = r.state[1];
    for (int k = 0; k < CLASSES; k++) {
        Course c;
        begin_course(&c, m, k);
        for (uint64_t count = 0;;) {
            uint32_t due = NEVER;
            int symbol = get_symbol(&r, &now, gap_table(m, c.context));
            uint32_t turn = now;
            now = then;
            then = turn;
            if (a->dues == a->room && !more_room(a))
                return -1;
            if (symbol < m->gap_symbols - 1) {
                int extra;
                count += bucket_start(symbol, &extra);
                count += get_bits(&r, extra);
                if (count >= elements || a->dues >= MOST_CHANGES + CLASSES || r.over)
                    return 1;
                due = (uint32_t)count++;
                learn_gap(&c, symbol);
            }
            a->due[a->dues++] = due;
            if (due == NEVER)
                break;
        }
    }
    r.state[a->dues & 1] = now;
    r.state[1 - (a->dues & 1)] = then;
    *a->reader = r;
    return 0;
}

static void begin_classes(Applier *a)
{
    const uint32_t *at = a->due;
    for (int k = 0; k < LANES; k++) {
        a->next[k] = NEVER;
        if (k >= CLASSES)
            continue;
        a->next[k] = *at++;
        a->later[k] = at;
        if (a->next[k] != NEVER)
            while (*at++ != NEVER)
                ;
    }
}

/* More than one, which is rare. */
static __attribute__((noinline)) uint64_t get_size(Reader *r, Table *t)
{
    int symbol = get_symbol(r, &r->state[SIZES], t);
    if (symbol <= SMALL_VALUES - 2)
        return (uint64_t)symbol + 2;
    int top = symbol - (SMALL_VALUES - 4), high = top > 32 ? top - 32 : 0;
    uint64_t size = 1;
    if (high)
        size = size << high | get_bits(r, high);
    return size << (top - high) | get_bits(r, top - high);
}

/* Read the values of the changes that were placed, and change the elements. */
static inline __attribute__((always_inline)) void
read_values(Applier *a, const uint8_t *base, uint8_t *out, Type type)
{
    Reader r = *a->reader;
    Model *m = a->model;
    const int lowest = a->lowest;
    const size_t placed = a->placed;
    int last = m->last;
    for (size_t i = 0; i < placed; i++) {
        size_t at = (size_t)a->places[i] * (size_t)type.width;
        uint64_t old = load(base + at, type.width), size = 1;
        int exponent = value_exponent(exponent_of(old, type), lowest);
        if (__builtin_expect(get_bit(&r, &r.state[SIZES], &m->ones[exponent], ONE_RATE), 0)) {
            *a->reader = r;
            size = get_size(a->reader, value_table(m, exponent));
            r = *a->reader;
        }
        int negative = get_bit(&r, &r.state[SIGNS], &m->signs[last], SIGN_RATE);
        last = follow_signs(last, negative);
        uint64_t all = (uint64_t)0 - (uint64_t)negative;
        store(out + at, type.width, from_order(to_order(old, type) + ((size ^ all) - all), type));
    }
    m->last = last;
    *a->reader = r;
    a->placed = 0;
}

static __attribute__((noinline)) void apply_values(Applier *a, const uint8_t *base, uint8_t *out, Type type)
{
    if (type.is_float) {
        type.is_float = 1;
        switch (type.width) {
        case 1: type.width = 1; read_values(a, base, out, type); break;
        case 2: type.width = 2; read_values(a, base, out, type); break;
        case 4: type.width = 4; read_values(a, base, out, type); break;
        default: type.width = 8; read_values(a, base, out, type);
        }
        return;
    }
    type.is_float = 0;
    switch (type.width) {
    case 1: type.width = 1; read_values(a, base, out, type); break;
    case 2: type.width = 2; read_values(a, base, out, type); break;
    case 4: type.width = 4; read_values(a, base, out, type); break;
    default: type.width = 8; read_values(a, base, out, type);
    }
}

/* Places of a piece as they were found, and their classes. */
typedef struct {
    size_t count;
    uint32_t places[PIECE];
    uint8_t classes[PIECE];
} Found;

static inline void found(Applier *a, Found *f, int class, size_t at)
{
    f->places[f->count] = (uint32_t)at;
    f->classes[f->count++] = (uint8_t)class;
    a->next[class] = *a->later[class]++;
}

/* Those of each class in turn: so their values come. */
static void place(Applier *a, Found *f)
{
    size_t at[CLASSES] = {0}, start = a->placed;
    for (size_t i = 0; i < f->count; i++)
        at[f->classes[i]]++;
    for (int k = 0; k < CLASSES; k++) {
        size_t size = at[k];
        at[k] = start;
        start += size;
    }
    for (size_t i = 0; i < f->count; i++)
        a->places[at[f->classes[i]]++] = f->places[i];
    a->placed += f->count;
    f->count = 0;
}

static inline void find_due(Applier *a, Found *f, const uint8_t *base, size_t from, size_t until, Type type)
{
    for (size_t i = from; i < until; i++) {
        int class = class_of(exponent_of(load(base + i * type.width, type.width), type), a->lowest);
        if (a->passed[class]++ == a->next[class])
            found(a, f, class, i);
    }
}

static inline void apply_portable(Applier *a, const uint8_t *base, uint8_t *out, size_t count, Type type)
{
    Found f;
    f.count = 0;
    memcpy(out, base, count * (size_t)type.width);
    for (size_t i = 0; i < count; i += PIECE) {
        find_due(a, &f, base, i, count - i < PIECE ? count : i + PIECE, type);
        if (f.count)
            place(a, &f);
        if (a->placed >= ENOUGH)
            apply_values(a, base, out, type);
    }
    apply_values(a, base, out, type);
}

#if HAVE_AVX2_PATH
/* The changes of a block; `due` says of which classes. */
AVX2 static void find_due_avx2(Applier *a, Found *f, const uint64_t *of, uint32_t due, size_t from)
{
    for (; due; due &= due - 1) {
        int k = __builtin_ctz(due);
        uint32_t end = a->passed[k] + (uint32_t)count_bits(of[k]);
        do {
            uint64_t bit = _pdep_u64((uint64_t)1 << (a->next[k] - a->passed[k]), of[k]);
            found(a, f, k, from + (size_t)__builtin_ctzll(bit));
        } while (a->next[k] < end);
    }
}

AVX2 static inline __attribute__((always_inline)) void
apply_avx2(Applier *a, const uint8_t *base, uint8_t *out, size_t count, Type type)
{
    size_t i = 0;
    Found f;
    f.count = 0;
    __m256i low = load_avx2((const uint8_t *)a->passed), high = load_avx2((const uint8_t *)(a->passed + 8));
    __m256i low_next = load_avx2((const uint8_t *)a->next), high_next = load_avx2((const uint8_t *)(a->next + 8));
    for (; i + BLOCK <= count; i += BLOCK) {
        const uint8_t *b = base + i * (size_t)type.width;
        uint8_t *o = out + i * (size_t)type.width;
        uint64_t of[LANES] = {0};
        for (int j = 0; j < BLOCK * type.width; j += 32)
            _mm256_storeu_si256((__m256i *)(o + j), load_avx2(b + j));
        members_avx2(b, type, a->lowest, of);
        __m256i low_end = _mm256_add_epi32(low, sizes_avx2(of));
        __m256i high_end = _mm256_add_epi32(high, sizes_avx2(of + 8));
        __m256i low_due = _mm256_cmpgt_epi32(low_end, low_next);
        __m256i high_due = _mm256_cmpgt_epi32(high_end, high_next);
        uint32_t due = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low_due))
                       | (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(high_due)) << 8;
        if (due) {
            _mm256_storeu_si256((__m256i *)a->passed, low);
            _mm256_storeu_si256((__m256i *)(a->passed + 8), high);
            find_due_avx2(a, &f, of, due, i);
            low_next = load_avx2((const uint8_t *)a->next);
            high_next = load_avx2((const uint8_t *)(a->next + 8));
        }
        low = low_end;
        high = high_end;
        if (f.count && (i + BLOCK) % PIECE == 0) {
            place(a, &f);
            if (a->placed >= ENOUGH)
                apply_values(a, base, out, type);
        }
    }
    _mm256_storeu_si256((__m256i *)a->passed, low);
    _mm256_storeu_si256((__m256i *)(a->passed + 8), high);
    memcpy(out + i * (size_t)type.width, base + i * (size_t)type.width, (count - i) * (size_t)type.width);
    find_due(a, &f, base, i, count, type);
    place(a, &f);
    apply_values(a, base, out, type);
}

#if HAVE_AVX512_PATH
/* Where in a piece the element number `n` of a class is; there are more than `n`. No branches: which block it is
 * cannot be foreseen. */
AVX512 static inline __attribute__((always_inline)) uint64_t
find_place(const Piece *p, int class, uint32_t n, int *block)
{
    const uint64_t even = 0x00ff00ff00ff00ff, each = 0x0001000100010001, high = 0x8000800080008000;
    uint64_t sizes = p->sizes[class];
    uint64_t pairs = ((sizes & even) + (sizes >> 8 & even)) * each; /* of blocks: how many until the end of each */
    uint64_t over = ((n * each | high) - pairs) & high;
    int pair = 16 * (int)count_bits(over);
    n -= (uint32_t)(pairs << 16 >> pair) & 0xffff;
    uint32_t first = (uint32_t)(sizes >> pair) & 0xff;
    uint32_t second = n >= first;
    n -= first & (0 - second);
    *block = pair / 8 + (int)second;
    return _pdep_u64((uint64_t)1 << n, members_of(p, *block, class));
}

enum { FORWARD = 4096 }; /* bytes that are asked for before they are needed */

/* Copy a piece, and take in its classes: how many there are of each until its end. */
AVX512 static inline __attribute__((always_inline)) void
copy_avx512(Piece *p, const uint8_t *b, uint8_t *o, Type type, int lowest, const uint32_t *before)
{
    for (int k = 0; k < BLOCKS * type.width; k++)
        _mm_prefetch((const char *)((uintptr_t)b + FORWARD + 64 * (unsigned)k), _MM_HINT_T0);
    for (int k = 0; k < BLOCKS * type.width; k++)
        _mm512_storeu_si512(o + 64 * k, _mm512_loadu_si512(b + 64 * k));
    __m512i sizes = piece_avx512(p, b, type, lowest);
    _mm512_store_si512(p->begin, _mm512_load_si512(before));
    _mm512_store_si512(p->end, _mm512_add_epi32(_mm512_load_si512(before), sizes));
}

/* Apply what changes in whole pieces; return how many elements these are. The next piece is taken in before
 * this one's changes are placed, which is all branches: the processor goes on with the one meanwhile. */
AVX512 static inline __attribute__((always_inline)) size_t
apply_avx512(Applier *a, const uint8_t *base, uint8_t *out, size_t count, Type type)
{
    const size_t whole = count / PIECE * PIECE;
    Piece two[2];
    __m512i next = _mm512_load_si512(a->next);
    if (whole)
        copy_avx512(&two[0], base, out, type, a->lowest, a->passed);
    for (size_t i = 0; i < whole; i += PIECE) {
        const Piece *p = &two[i / PIECE & 1];
        uint32_t due = number_of_16(_mm512_cmpgt_epi32_mask(_mm512_load_si512(p->end), next));
        if (i + PIECE < whole) {
            size_t skip = (i + PIECE) * (size_t)type.width;
            copy_avx512(&two[~(i / PIECE) & 1], base + skip, out + skip, type, a->lowest, p->end);
        } else
            _mm512_store_si512(a->passed, _mm512_load_si512(p->end));
        while (due) {
            int k = __builtin_ctz(due), block;
            uint64_t bit = find_place(p, k, a->next[k] - p->begin[k], &block);
            a->places[a->placed++] = (uint32_t)(i + (size_t)block * BLOCK + (size_t)__builtin_ctzll(bit));
            uint32_t later = *a->later[k]++;
            a->next[k] = later;
            next = _mm512_mask_set1_epi32(next, (__mmask16)(1u << k), (int)later);
            due &= ~((uint32_t)(later >= p->end[k]) << k);
        }
        if (a->placed >= ENOUGH)
            apply_values(a, base, out, type);
    }
    apply_values(a, base, out, type);
    return whole;
}

AVX512 static size_t apply_segment_avx512(Applier *a, const Segment *s, Type type)
{
    switch (type.width) {
    case 1: type.width = 1; return apply_avx512(a, s->base, s->out, s->count, type);
    case 2: type.width = 2; return apply_avx512(a, s->base, s->out, s->count, type);
    default: type.width = 4; return apply_avx512(a, s->base, s->out, s->count, type);
    }
}
#endif

AVX2 static void apply_segment_avx2(Applier *a, const Segment *s, Type type)
{
    size_t done = 0;
#if HAVE_AVX512_PATH
    if (path >= WITH_AVX512)
        done = apply_segment_avx512(a, s, type);
#endif
    const uint8_t *b = s->base + done * (size_t)type.width;
    uint8_t *o = s->out + done * (size_t)type.width;
    size_t left = s->count - done;
    switch (type.width) {
    case 1: type.width = 1; apply_avx2(a, b, o, left, type); break;
    case 2: type.width = 2; apply_avx2(a, b, o, left, type); break;
    default: type.width = 4; apply_avx2(a, b, o, left, type);
    }
}
#endif

static void apply(Applier *a, const Segment *s, size_t segments)
{
    Type type = a->type;
    for (size_t i = 0; i < segments; i++) {
#if HAVE_AVX2_PATH
        if (path >= WITH_AVX2 && type.width <= 4)
            apply_segment_avx2(a, &s[i], type);
        else
#endif
        switch (type.width) { /* a constant width makes a tight loop */
        case 1: type.width = 1; apply_portable(a, s[i].base, s[i].out, s[i].count, type); break;
        case 2: type.width = 2; apply_portable(a, s[i].base, s[i].out, s[i].count, type); break;
        case 4: type.width = 4; apply_portable(a, s[i].base, s[i].out, s[i].count, type); break;
        default: type.width = 8; apply_portable(a, s[i].base, s[i].out, s[i].count, type);
        }
    }
}

/* --- the two directions ---------------------------------------------------------------------------- */

/* Choose the lowest class: the most common exponents get a class each, smaller ones share the lowest. */
static int choose_lowest(const Segment *s, size_t segments, Type type)
{
    uint64_t seen[2048] = {0}, total = 0;
    if (type.mask == 0)
        return 0;
    for (size_t i = 0; i < segments; i++) {
        size_t stride = 1 + s[i].count / 65536;
        for (size_t j = 0; j < s[i].count; j += stride) {
            seen[exponent_of(load(s[i].base + j * type.width, type.width), type)] += stride;
            total += stride;
        }
    }
    uint64_t above = 0;
    int highest = (int)type.mask;
    while (highest > 0 && (above += seen[highest]) < total / 5)
        highest--;
    int lowest = highest - (CLASSES - 2);
    return lowest < 0 ? 0 : lowest;
}

enum { HEAD = 3 };

static int all_same(const Segment *s, size_t segments, Type type)
{
    for (size_t i = 0; i < segments; i++)
        if (memcmp(s[i].base, s[i].next, s[i].count * (size_t)type.width) != 0)
            return 0;
    return 1;
}

/* Return the coded bytes (malloc), none for no change, or NULL; `*full` says that there are more changes
 * than `most`. */
static uint8_t *encode(const Segment *s, size_t segments, Type type, size_t most, size_t *length, int *full)
{
    Finder f;
    Writer w;
    memset(&f, 0, sizeof f);
    memset(&w, 0, sizeof w);
    f.most = most < MOST_CHANGES ? most : MOST_CHANGES;
    *length = 0;
    *full = 0;
    if (all_same(s, segments, type))
        return malloc(1);
    int lowest = choose_lowest(s, segments, type);
    uint64_t elements = 0;
    for (size_t i = 0; i < segments; i++)
        elements += s[i].count;
    find(&f, s, segments, type, lowest);
    uint8_t *bytes = NULL;
    *full = f.full == 1;
    if (!f.full) {
        Model *m = malloc(sizeof *m);
        /* Where to look for the first changes: the average gap of the lowest class. */
        int first = 0;
        if (f.count) {
            int64_t mean = log2_of_half(elements / f.count / 16 + 1);
            first = (int)(mean < 0 ? 0 : mean / (ONE / 4));
        }
        if (m != NULL) {
            begin_model(m, elements, first);
            if (write_events(&w, m, &f))
                bytes = finish(&w, HEAD, length);
            free(m);
        }
        if (bytes != NULL) {
            bytes[0] = (uint8_t)lowest;
            bytes[1] = (uint8_t)(lowest >> 8);
            bytes[2] = (uint8_t)first;
        }
    }
    free(f.events);
    free(w.ops);
    free(w.bits);
    return bytes;
}

/* Return 0, or -1 without memory, or 1 for bytes that encode never wrote. */
static int decode(const uint8_t *bytes, size_t length, const Segment *s, size_t segments, Type type)
{
    if (length < HEAD + 4 * STATES || (bytes[0] | (uint64_t)bytes[1] << 8) > type.mask)
        return 1;
    Model *m = malloc(sizeof *m);
    if (m == NULL)
        return -1;
    uint64_t elements = 0;
    for (size_t i = 0; i < segments; i++)
        elements += s[i].count;
    Reader r;
    memset(&r, 0, sizeof r);
    r.words = bytes + HEAD + 4 * STATES;
    r.end = bytes + length;
    r.length = length;
    for (int k = 0; k < STATES; k++)
        r.state[k] = (uint32_t)load(bytes + HEAD + 4 * k, 4);
    Applier a;
    memset(&a, 0, sizeof a);
    a.reader = &r;
    a.model = m;
    a.type = type;
    a.lowest = bytes[0] | bytes[1] << 8;
    begin_model(m, elements, bytes[2]);
    int wrong = read_gaps(&a, elements);
    if (!wrong) {
        begin_classes(&a);
        apply(&a, s, segments);
        for (int k = 0; k < CLASSES; k++)
            wrong |= a.next[k] != NEVER; /* a change was announced beyond the end */
        wrong |= r.over || (size_t)(r.end - r.words) != (r.bits + 7) / 8;
        if (!wrong && r.bits % 8)
            wrong |= (uint8_t)(*r.words << r.bits % 8) != 0; /* what is left of the last byte */
        wrong |= r.state[0] != STATE_LOW || r.state[1] != STATE_LOW;
    }
    free(a.due);
    free(m);
    return wrong;
}

/* --- byte planes: for what changed so much that its places are not worth telling --------------------- */

/* How an element stands to its base's. In order: the difference in the order of the values, small ones of either
 * sign as small numbers. The others look at the bits alone: codes that go on past zero or past the largest, and
 * bits that flip, are few different numbers so. */
enum { IN_ORDER, SUBTRACTED, XORED, WAYS };

/* Without a base: the bits, the sign last, so that the exponent lies in the highest byte. */
static inline uint64_t to_plane(const uint8_t *base, const uint8_t *next, Type type, int way)
{
    uint64_t sign = (uint64_t)1 << (8 * type.width - 1), all = sign | (sign - 1);
    uint64_t bits = load(next, type.width);
    if (base == NULL)
        return type.is_float ? (bits << 1 | bits >> (8 * type.width - 1)) & all : bits;
    if (way != IN_ORDER)
        return way == XORED ? bits ^ load(base, type.width) : (bits - load(base, type.width)) & all;
    uint64_t d = (to_order(bits, type) - to_order(load(base, type.width), type)) & all;
    return (d << 1 ^ (d & sign ? all : 0)) & all;
}

static inline uint64_t from_plane(const uint8_t *base, uint64_t value, Type type, int way)
{
    uint64_t sign = (uint64_t)1 << (8 * type.width - 1), all = sign | (sign - 1);
    if (base == NULL)
        return type.is_float ? (value >> 1 | (value & 1 ? sign : 0)) & all : value;
    if (way != IN_ORDER)
        return way == XORED ? value ^ load(base, type.width) : (value + load(base, type.width)) & all;
    uint64_t d = (value >> 1 ^ (value & 1 ? all : 0)) & all;
    return from_order(to_order(load(base, type.width), type) + d, type);
}

enum { WIDEST = 8 };

typedef struct {
    uint8_t *at[WIDEST]; /* written by split, read by merge; the lowest byte first */
    int way;
} Planes;

static inline void split_portable(const Segment *s, const Planes *p, size_t from, Type type, int way)
{
    for (size_t j = from; j < s->count; j++) {
        size_t at = j * (size_t)type.width;
        uint64_t v = to_plane(s->base ? s->base + at : NULL, s->next + at, type, way);
        for (int k = 0; k < type.width; k++)
            p->at[k][j] = (uint8_t)(v >> (8 * k));
    }
}

static inline void merge_portable(const Segment *s, const Planes *p, size_t from, Type type, int way)
{
    for (size_t j = from; j < s->count; j++) {
        size_t at = j * (size_t)type.width;
        uint64_t v = 0;
        for (int k = 0; k < type.width; k++)
            v |= (uint64_t)p->at[k][j] << (8 * k);
        store(s->out + at, type.width, from_plane(s->base ? s->base + at : NULL, v, type, way));
    }
}

#if HAVE_AVX2_PATH
/* The functions above on vectors of elements of 1, 2 or 4 bytes. */
#define VECTOR AVX2 static inline __attribute__((always_inline)) __m256i

VECTOR ones_of(int width)
{
    return width == 1 ? _mm256_set1_epi8(1) : width == 2 ? _mm256_set1_epi16(1) : _mm256_set1_epi32(1);
}

VECTOR top_of(int width)
{
    return width == 1   ? _mm256_set1_epi8((char)0x80)
           : width == 2 ? _mm256_set1_epi16((short)0x8000)
                        : _mm256_set1_epi32((int)0x80000000u);
}

VECTOR add_of(__m256i a, __m256i b, int width)
{
    return width == 1 ? _mm256_add_epi8(a, b) : width == 2 ? _mm256_add_epi16(a, b) : _mm256_add_epi32(a, b);
}

VECTOR sub_of(__m256i a, __m256i b, int width)
{
    return width == 1 ? _mm256_sub_epi8(a, b) : width == 2 ? _mm256_sub_epi16(a, b) : _mm256_sub_epi32(a, b);
}

/* All ones where the highest bit is set. */
VECTOR negative_of(__m256i a, int width)
{
    return width == 1   ? _mm256_cmpgt_epi8(_mm256_setzero_si256(), a)
           : width == 2 ? _mm256_srai_epi16(a, 15)
                        : _mm256_srai_epi32(a, 31);
}

VECTOR half_of(__m256i a, int width)
{
    return width == 1   ? _mm256_and_si256(_mm256_srli_epi16(a, 1), _mm256_set1_epi8(0x7f))
           : width == 2 ? _mm256_srli_epi16(a, 1)
                        : _mm256_srli_epi32(a, 1);
}

VECTOR to_order_of(__m256i bits, Type type)
{
    __m256i top = top_of(type.width);
    if (!type.is_float)
        return _mm256_xor_si256(bits, top);
    return _mm256_xor_si256(bits, _mm256_or_si256(negative_of(bits, type.width), top));
}

VECTOR from_order_of(__m256i order, Type type)
{
    __m256i top = top_of(type.width);
    if (!type.is_float)
        return _mm256_xor_si256(order, top);
    __m256i positive = negative_of(order, type.width);
    return _mm256_xor_si256(order, _mm256_or_si256(_mm256_andnot_si256(positive, _mm256_set1_epi8(-1)), top));
}

VECTOR to_plane_of(const uint8_t *base, const uint8_t *next, Type type, int way)
{
    __m256i bits = load_avx2(next);
    if (base == NULL && !type.is_float)
        return bits;
    if (base == NULL) /* the sign, all ones, subtracted: one added */
        return sub_of(add_of(bits, bits, type.width), negative_of(bits, type.width), type.width);
    if (way == XORED)
        return _mm256_xor_si256(bits, load_avx2(base));
    if (way == SUBTRACTED)
        return sub_of(bits, load_avx2(base), type.width);
    __m256i d = sub_of(to_order_of(bits, type), to_order_of(load_avx2(base), type), type.width);
    return _mm256_xor_si256(add_of(d, d, type.width), negative_of(d, type.width));
}

VECTOR from_plane_of(const uint8_t *base, __m256i v, Type type, int way)
{
    if (base != NULL && way == XORED)
        return _mm256_xor_si256(v, load_avx2(base));
    if (base != NULL && way == SUBTRACTED)
        return add_of(v, load_avx2(base), type.width);
    __m256i odd = _mm256_and_si256(v, ones_of(type.width));
    odd = sub_of(_mm256_setzero_si256(), odd, type.width);
    if (base == NULL && !type.is_float)
        return v;
    __m256i half = half_of(v, type.width);
    if (base == NULL)
        return _mm256_or_si256(half, _mm256_and_si256(odd, top_of(type.width)));
    __m256i d = _mm256_xor_si256(half, odd);
    return from_order_of(add_of(to_order_of(load_avx2(base), type), d, type.width), type);
}

#define SAVE(at, v) _mm256_storeu_si256((__m256i *)(at), v)

AVX2 static inline __attribute__((always_inline)) size_t
split_avx2(const Segment *s, const Planes *p, Type type, int way)
{
    const int width = type.width;
    size_t j = 0;
    for (; j + 32 <= s->count; j += 32) {
        const uint8_t *n = s->next + j * (size_t)width, *b = s->base ? s->base + j * (size_t)width : NULL;
        __m256i v[4];
        for (int k = 0; k < width; k++)
            v[k] = to_plane_of(b ? b + 32 * k : NULL, n + 32 * k, type, way);
        if (width == 1) {
            SAVE(p->at[0] + j, v[0]);
        } else if (width == 2) {
            const __m256i byte = _mm256_set1_epi16(0xff);
            __m256i low = _mm256_packus_epi16(_mm256_and_si256(v[0], byte), _mm256_and_si256(v[1], byte));
            __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(v[0], 8), _mm256_srli_epi16(v[1], 8));
            SAVE(p->at[0] + j, _mm256_permute4x64_epi64(low, 0xd8));
            SAVE(p->at[1] + j, _mm256_permute4x64_epi64(high, 0xd8));
        } else {
            const __m256i byte = _mm256_set1_epi32(0xff);
            for (int k = 0; k < 4; k++) {
                __m256i a = _mm256_and_si256(_mm256_srli_epi32(v[0], 8 * k), byte);
                __m256i c = _mm256_and_si256(_mm256_srli_epi32(v[1], 8 * k), byte);
                __m256i d = _mm256_and_si256(_mm256_srli_epi32(v[2], 8 * k), byte);
                __m256i e = _mm256_and_si256(_mm256_srli_epi32(v[3], 8 * k), byte);
                a = _mm256_packus_epi16(_mm256_packus_epi32(a, c), _mm256_packus_epi32(d, e));
                SAVE(p->at[k] + j, _mm256_permutevar8x32_epi32(a, PACKED_FOURS));
            }
        }
    }
    return j;
}

AVX2 static inline __attribute__((always_inline)) size_t
merge_avx2(const Segment *s, const Planes *p, Type type, int way)
{
    const int width = type.width;
    size_t j = 0;
    for (; j + 32 <= s->count; j += 32) {
        const uint8_t *b = s->base ? s->base + j * (size_t)width : NULL;
        uint8_t *o = s->out + j * (size_t)width;
        __m256i v[4], q[4];
        for (int k = 0; k < width; k++)
            q[k] = load_avx2(p->at[k] + j);
        if (width == 1) {
            v[0] = q[0];
        } else if (width == 2) {
            q[0] = _mm256_permute4x64_epi64(q[0], 0xd8);
            q[1] = _mm256_permute4x64_epi64(q[1], 0xd8);
            v[0] = _mm256_unpacklo_epi8(q[0], q[1]);
            v[1] = _mm256_unpackhi_epi8(q[0], q[1]);
        } else {
            for (int k = 0; k < 4; k++)
                q[k] = _mm256_permutevar8x32_epi32(q[k], UNPACKED_FOURS);
            __m256i a = _mm256_unpacklo_epi8(q[0], q[1]), c = _mm256_unpackhi_epi8(q[0], q[1]);
            __m256i d = _mm256_unpacklo_epi8(q[2], q[3]), e = _mm256_unpackhi_epi8(q[2], q[3]);
            v[0] = _mm256_unpacklo_epi16(a, d);
            v[1] = _mm256_unpackhi_epi16(a, d);
            v[2] = _mm256_unpacklo_epi16(c, e);
            v[3] = _mm256_unpackhi_epi16(c, e);
        }
        for (int k = 0; k < width; k++)
            SAVE(o + 32 * k, from_plane_of(b ? b + 32 * k : NULL, v[k], type, way));
    }
    return j;
}

/* Constants for way, sort and width make tight loops. */
#define BY_VECTOR_WIDTH(call)                                                                       \
    switch (type.width) {                                                                           \
    case 1: type.width = 1; return call;                                                            \
    case 2: type.width = 2; return call;                                                            \
    case 4: type.width = 4; return call;                                                            \
    default: return 0;                                                                              \
    }

#define BY_VECTORS(call)                                                                            \
    if (type.is_float) {                                                                            \
        type.is_float = 1;                                                                          \
        BY_VECTOR_WIDTH(call)                                                                       \
    }                                                                                               \
    type.is_float = 0;                                                                              \
    BY_VECTOR_WIDTH(call)

AVX2 static size_t split_segment_avx2(const Segment *s, const Planes *p, Type type)
{
    switch (p->way) {
    case SUBTRACTED: BY_VECTOR_WIDTH(split_avx2(s, p, type, SUBTRACTED))
    case XORED: BY_VECTOR_WIDTH(split_avx2(s, p, type, XORED))
    default: BY_VECTORS(split_avx2(s, p, type, IN_ORDER))
    }
}

AVX2 static size_t merge_segment_avx2(const Segment *s, const Planes *p, Type type)
{
    switch (p->way) {
    case SUBTRACTED: BY_VECTOR_WIDTH(merge_avx2(s, p, type, SUBTRACTED))
    case XORED: BY_VECTOR_WIDTH(merge_avx2(s, p, type, XORED))
    default: BY_VECTORS(merge_avx2(s, p, type, IN_ORDER))
    }
}
#endif

#define BY_WIDTH(call)                                                                              \
    switch (type.width) {                                                                           \
    case 1: type.width = 1; call; break;                                                            \
    case 2: type.width = 2; call; break;                                                            \
    case 4: type.width = 4; call; break;                                                            \
    default: type.width = 8; call;                                                                  \
    }

static void split_segment(const Segment *s, const Planes *p, Type type)
{
    size_t done = 0;
#if HAVE_AVX2_PATH
    if (path >= WITH_AVX2)
        done = split_segment_avx2(s, p, type);
#endif
    switch (p->way) {
    case SUBTRACTED: BY_WIDTH(split_portable(s, p, done, type, SUBTRACTED)) break;
    case XORED: BY_WIDTH(split_portable(s, p, done, type, XORED)) break;
    default: BY_WIDTH(split_portable(s, p, done, type, IN_ORDER))
    }
}

static void merge_segment(const Segment *s, const Planes *p, Type type)
{
    size_t done = 0;
#if HAVE_AVX2_PATH
    if (path >= WITH_AVX2)
        done = merge_segment_avx2(s, p, type);
#endif
    switch (p->way) {
    case SUBTRACTED: BY_WIDTH(merge_portable(s, p, done, type, SUBTRACTED)) break;
    case XORED: BY_WIDTH(merge_portable(s, p, done, type, XORED)) break;
    default: BY_WIDTH(merge_portable(s, p, done, type, IN_ORDER))
    }
}

static void do_planes(const Segment *s, size_t segments, Planes p, Type type,
                      void (*one)(const Segment *, const Planes *, Type))
{
    for (size_t i = 0; i < segments; i++) {
        one(&s[i], &p, type);
        for (int k = 0; k < type.width; k++)
            p.at[k] += s[i].count;
    }
}

static void prepare(void)
{
    int extra;
    for (int i = 0; i < MOST_SYMBOLS; i++) {
        uint64_t start = bucket_start(i, &extra);
        bucket_logs[i] = (int32_t)log2_of_half(2 * start + ((uint64_t)1 << extra));
    }
    for (int i = 1; i < 50; i++)
        rates[i] = i < 49 ? ONE / (i + 1) : OWN_RATE;
}

static int best_path(void)
{
#if HAVE_AVX2_PATH
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")
          && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt")))
        return PORTABLE;
#if HAVE_AVX512_PATH
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vpopcntdq")
        && __builtin_cpu_supports("gfni"))
        return WITH_AVX512;
#endif
    return WITH_AVX2;
#else
    return PORTABLE;
#endif
}

#ifndef KERNEL_WITHOUT_PYTHON
/* --- Python ------------------------------------------------------------------------------------------ */

typedef struct {
    Segment *s;
    Py_buffer *held;
    size_t count, buffers, elements;
    Type type;
} Segments;

static void release(Segments *g)
{
    for (size_t i = 0; i < g->buffers; i++)
        PyBuffer_Release(&g->held[i]);
    free(g->held);
    free(g->s);
    memset(g, 0, sizeof *g);
}

/* The bytes of (buffer, offset), of which `length` are needed; NULL with an exception. */
static uint8_t *range_of(Segments *g, PyObject *buffer, Py_ssize_t offset, size_t length, int writable)
{
    Py_buffer *view = &g->held[g->buffers];
    if (PyObject_GetBuffer(buffer, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    g->buffers++;
    if (offset < 0 || offset > view->len || (size_t)(view->len - offset) < length) {
        PyErr_SetString(PyExc_ValueError, "a segment lies outside of its buffer");
        return NULL;
    }
    return (uint8_t *)view->buf + offset;
}

/* Take in a list of (base or None, base offset, other, other offset, elements). */
static int take(Segments *g, PyObject *list, int type, int writable)
{
    memset(g, 0, sizeof *g);
    if (type < 0 || type >= TYPES) {
        PyErr_SetString(PyExc_ValueError, "unknown element type");
        return -1;
    }
    g->type = TYPE[type];
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "segments are a list");
        return -1;
    }
    Py_ssize_t count = PyList_Size(list);
    g->s = calloc((size_t)count + 1, sizeof *g->s);
    g->held = calloc(2 * (size_t)count + 1, sizeof *g->held);
    if (g->s == NULL || g->held == NULL) {
        release(g);
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *base, *other, *item = PyList_GetItem(list, i);
        Py_ssize_t base_offset, other_offset, elements;
        if (item == NULL || !PyTuple_Check(item)
            || !PyArg_ParseTuple(item, "OnOnn", &base, &base_offset, &other, &other_offset, &elements)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a segment is a tuple");
            goto failed;
        }
        if (elements < 0 || elements >= (1 << 29) || g->elements + (size_t)elements >= (1 << 29)) {
            PyErr_SetString(PyExc_ValueError, "too many elements");
            goto failed;
        }
        size_t length = (size_t)elements * (size_t)g->type.width;
        if (base != Py_None) {
            g->s[i].base = range_of(g, base, base_offset, length, 0);
            if (g->s[i].base == NULL)
                goto failed;
        }
        uint8_t *at = range_of(g, other, other_offset, length, writable);
        if (at == NULL)
            goto failed;
        g->s[i].out = at;
        g->s[i].next = at;
        g->s[i].count = (size_t)elements;
        g->elements += (size_t)elements;
        g->count++;
    }
    return 0;
failed:
    release(g);
    return -1;
}

static int need_bases(const Segments *g)
{
    for (size_t i = 0; i < g->count; i++)
        if (g->s[i].base == NULL) {
            PyErr_SetString(PyExc_ValueError, "a segment has no base");
            return -1;
        }
    return 0;
}

PyDoc_STRVAR(encode_doc,
"encode_changes(type, segments, most, /)\n--\n\n"
"Return what changed, coded; nothing for no change, None if more than `most` elements changed.\n\n"
"Segments are (base, base offset, new, new offset, elements); offsets in bytes.");

static PyObject *py_encode(PyObject *self, PyObject *args)
{
    int type, full = 0;
    PyObject *list;
    Py_ssize_t most;
    Segments g;
    (void)self;
    if (!PyArg_ParseTuple(args, "iOn", &type, &list, &most) || take(&g, list, type, 0) < 0)
        return NULL;
    if (most < 0 || need_bases(&g) < 0) {
        release(&g);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "most is negative");
        return NULL;
    }
    uint8_t *bytes;
    size_t length = 0;
    Py_BEGIN_ALLOW_THREADS
    bytes = encode(g.s, g.count, g.type, (size_t)most, &length, &full);
    Py_END_ALLOW_THREADS
    release(&g);
    if (bytes == NULL) {
        if (full)
            Py_RETURN_NONE;
        return PyErr_NoMemory();
    }
    PyObject *result = PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)length);
    free(bytes);
    return result;
}

PyDoc_STRVAR(decode_doc,
"decode_changes(type, segments, payload, /)\n--\n\n"
"Write base and changes together into (base, base offset, out, out offset, elements).\n\n"
"Raises ValueError for a payload that encode_changes did not write; `out` holds anything then.");

static PyObject *py_decode(PyObject *self, PyObject *args)
{
    int type, wrong;
    PyObject *list;
    Py_buffer payload;
    Segments g;
    (void)self;
    if (!PyArg_ParseTuple(args, "iOy*", &type, &list, &payload))
        return NULL;
    if (take(&g, list, type, 1) < 0 || need_bases(&g) < 0) {
        release(&g);
        PyBuffer_Release(&payload);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    wrong = decode(payload.buf, (size_t)payload.len, g.s, g.count, g.type);
    Py_END_ALLOW_THREADS
    release(&g);
    PyBuffer_Release(&payload);
    if (wrong < 0)
        return PyErr_NoMemory();
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "coded changes do not decode");
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(split_doc,
"split_planes(type, segments, planes, way=0, /)\n--\n\n"
"Write elements (or how they differ from the base) as byte planes, a buffer each, the lowest byte first.\n\n"
"Ways: 0 in the order of the values, 1 subtracted, 2 exclusive or. The latter two need bases.");

PyDoc_STRVAR(merge_doc,
"merge_planes(type, segments, planes, way=0, /)\n--\n\n"
"Write elements from byte planes: the inverse of split_planes.");

static PyObject *planes(PyObject *args, int split)
{
    int type, held = 0;
    PyObject *list, *buffers, *result = NULL;
    Py_buffer views[WIDEST];
    Planes p = {.way = IN_ORDER};
    Segments g;
    if (!PyArg_ParseTuple(args, "iOO|i", &type, &list, &buffers, &p.way) || take(&g, list, type, !split) < 0)
        return NULL;
    if (p.way < 0 || p.way >= WAYS) {
        PyErr_SetString(PyExc_ValueError, "unknown way to differ from the base");
        goto done;
    }
    if (p.way != IN_ORDER && need_bases(&g) < 0)
        goto done;
    if (!PyList_Check(buffers) || PyList_Size(buffers) != g.type.width) {
        PyErr_SetString(PyExc_ValueError, "planes are a list of as many buffers as elements have bytes");
        goto done;
    }
    for (; held < g.type.width; held++) {
        PyObject *buffer = PyList_GetItem(buffers, held);
        if (buffer == NULL
            || PyObject_GetBuffer(buffer, &views[held], split ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            goto done;
        p.at[held] = views[held].buf;
        if ((size_t)views[held].len != g.elements) {
            PyErr_SetString(PyExc_ValueError, "a plane has another size");
            held++;
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    do_planes(g.s, g.count, p, g.type, split ? split_segment : merge_segment);
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    result = Py_None;
done:
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    release(&g);
    return result;
}

static PyObject *py_split(PyObject *self, PyObject *args)
{
    (void)self;
    return planes(args, 1);
}

static PyObject *py_merge(PyObject *self, PyObject *args)
{
    (void)self;
    return planes(args, 0);
}

PyDoc_STRVAR(path_doc,
"use_path(most, /)\n--\n\n"
"Take the best path up to `most` (0 portable, 1 AVX2, 2 AVX-512); return which was taken before.\n\n"
"For tests: by itself the kernel takes the best that the processor has.");

static PyObject *py_path(PyObject *self, PyObject *args)
{
    int most, before = path;
    (void)self;
    if (!PyArg_ParseTuple(args, "i", &most))
        return NULL;
    path = most < 0 ? PORTABLE : most < best_path() ? most : best_path();
    return PyLong_FromLong(before);
}

/* How many elements differ, for each segment. */
static void count_changes(const Segment *s, size_t segments, int width, uint64_t *changed)
{
    enum { SOME = 64 };
    for (size_t i = 0; i < segments; i++) {
        size_t bytes = s[i].count * (size_t)width, block = SOME;
        uint64_t found = 0;
        for (size_t at = 0; at < bytes; at += block) {
            if (block > bytes - at)
                block = bytes - at;
            if (memcmp(s[i].base + at, s[i].next + at, block) == 0)
                continue;
            for (size_t j = at; j < at + block; j += (size_t)width)
                found += load(s[i].base + j, width) != load(s[i].next + j, width);
        }
        changed[i] = found;
    }
}

PyDoc_STRVAR(count_doc,
"count_changes(type, segments, /)\n--\n\n"
"Return for each (base, base offset, new, new offset, elements) how many elements differ.");

static PyObject *py_count(PyObject *self, PyObject *args)
{
    int type;
    PyObject *list;
    Segments g;
    (void)self;
    if (!PyArg_ParseTuple(args, "iO", &type, &list) || take(&g, list, type, 0) < 0)
        return NULL;
    if (need_bases(&g) < 0) {
        release(&g);
        return NULL;
    }
    uint64_t *changed = malloc((g.count + 1) * sizeof *changed);
    size_t count = g.count;
    if (changed != NULL) {
        Py_BEGIN_ALLOW_THREADS
        count_changes(g.s, g.count, g.type.width, changed);
        Py_END_ALLOW_THREADS
    }
    release(&g);
    if (changed == NULL)
        return PyErr_NoMemory();
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result != NULL && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(changed[i]);
        if (number == NULL || PyList_SetItem(result, (Py_ssize_t)i, number) < 0) {
            Py_DECREF(result);
            result = NULL;
        }
    }
    free(changed);
    return result;
}

static PyMethodDef METHODS[] = {
    {"encode_changes", py_encode, METH_VARARGS, encode_doc},
    {"decode_changes", py_decode, METH_VARARGS, decode_doc},
    {"split_planes", py_split, METH_VARARGS, split_doc},
    {"merge_planes", py_merge, METH_VARARGS, merge_doc},
    {"count_changes", py_count, METH_VARARGS, count_doc},
    {"use_path", py_path, METH_VARARGS, path_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernel", "The codec's inner loops.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    prepare();
    path = best_path();
    return PyModule_Create(&MODULE);
}
#endif
