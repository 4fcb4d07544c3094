/* The codec's inner loops: what changed between two arrays of numbers, coded in few bits.
 *
 * A change is coded by its place and its difference. Its place is a gap counted among the elements
 * of the same exponent class of the *base*, which both sides know: an optimiser moves every weight by
 * about the same amount, so small weights, whose neighbours are close, change far more often. Its
 * difference is taken in the order of the values, given the exponent and the sign of the difference
 * before. Both go through an adaptive range-free entropy coder (rANS, Duda 2013).
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

enum { CLASSES = 12, LANES = 16, VALUE_EXPONENTS = 32, VALUE_BELOW = 8 };

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

/* Bits as unsigned integers in the order of the values: a bijection of 0 .. 2^(8 width) - 1. */
static inline uint64_t to_order(uint64_t bits, Type type)
{
    uint64_t sign = (uint64_t)1 << (8 * type.width - 1);
    uint64_t all = sign | (sign - 1);
    if (!type.is_float)
        return (bits ^ sign) & all;
    return bits & sign ? ~bits & all : bits | sign;
}

static inline uint64_t from_order(uint64_t order, Type type)
{
    uint64_t sign = (uint64_t)1 << (8 * type.width - 1);
    uint64_t all = sign | (sign - 1);
    order &= all;
    if (!type.is_float)
        return order ^ sign;
    return order & sign ? order & ~sign : ~order & all;
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

/* --- rANS: words of 16 bits, a state of 32 ------------------------------------------------------
 *
 * Gaps and values are two streams, because a processor can decode them side by side. The first is read from
 * its beginning on, the second from its end backwards; they meet.
 */

#define STATE_LOW ((uint32_t)1 << 16)
enum { SIGN_RATE = 6, ONE_RATE = 5 };

typedef struct {
    uint32_t *ops; /* start | (width - 1) << 16, in the order of decoding */
    size_t count, room;
    int failed;
} Writer;

static void put(Writer *w, uint32_t start, uint32_t width)
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
    w->ops[w->count++] = start | (width - 1) << 16;
}

static void put_symbol(Writer *w, Table *t, int symbol)
{
    put(w, t->starts[symbol], (uint32_t)t->starts[symbol + 1] - t->starts[symbol]);
    learn(t, symbol);
}

/* Never 0 and never SCALE: what is left of either side is at least 2^rate - 1. */
static inline uint16_t follow_bit(uint32_t zeros, int bit, int rate)
{
    return (uint16_t)(bit ? zeros - (zeros >> rate) : zeros + ((SCALE - zeros) >> rate));
}

static void put_bit(Writer *w, uint16_t *middle, int bit, int rate)
{
    uint32_t zeros = *middle;
    put(w, bit ? zeros : 0, bit ? SCALE - zeros : zeros);
    *middle = follow_bit(zeros, bit, rate);
}

static void put_bits(Writer *w, uint64_t value, int bits)
{
    while (bits > 0) {
        int some = bits > 12 ? 12 : bits;
        uint32_t part = (uint32_t)(value & (((uint64_t)1 << some) - 1));
        put(w, part << (SCALE_BITS - some), 1u << (SCALE_BITS - some));
        value >>= some;
        bits -= some;
    }
}

typedef struct {
    const uint8_t *low, *high; /* what is left */
    uint32_t gaps, values;     /* the states */
    int over;                  /* read past the end */
} Reader;

enum { GAPS, VALUES };

/* Whether a word is needed is a coin toss: no branch on it. */
static inline __attribute__((always_inline)) void
advance(Reader *r, int stream, uint32_t start, uint32_t width)
{
    uint32_t state = stream == GAPS ? r->gaps : r->values, word = 0;
    state = width * (state >> SCALE_BITS) + (state & (SCALE - 1)) - start;
    uint32_t need = state < STATE_LOW;
    if (r->high - r->low < 2)
        r->over |= (int)need;
    else if (stream == GAPS) {
        word = (uint32_t)load(r->low, 2);
        r->low += 2 * need;
    } else {
        word = (uint32_t)load(r->high - 2, 2);
        r->high -= 2 * need;
    }
    state = need ? state << 16 | word : state;
    if (stream == GAPS)
        r->gaps = state;
    else
        r->values = state;
}

static inline uint32_t slot_of(const Reader *r, int stream)
{
    return (stream == GAPS ? r->gaps : r->values) & (SCALE - 1);
}

static inline __attribute__((always_inline)) int
get_symbol(Reader *r, int stream, Table *t)
{
    uint32_t slot = slot_of(r, stream);
    int symbol = t->lookup[slot >> (SCALE_BITS - LOOKUP_BITS)];
    while (t->starts[symbol + 1] <= slot)
        symbol++;
    advance(r, stream, t->starts[symbol], (uint32_t)t->starts[symbol + 1] - t->starts[symbol]);
    learn(t, symbol);
    return symbol;
}

/* A bit; `middle` is the share of zeros, and follows them. */
static inline __attribute__((always_inline)) int
get_bit(Reader *r, int stream, uint16_t *middle, int rate)
{
    uint32_t zeros = *middle;
    int bit = slot_of(r, stream) >= zeros;
    advance(r, stream, bit ? zeros : 0, bit ? SCALE - zeros : zeros);
    *middle = follow_bit(zeros, bit, rate);
    return bit;
}

static inline __attribute__((always_inline)) uint64_t
get_bits(Reader *r, int stream, int bits)
{
    uint64_t value = 0;
    int done = 0;
    while (done < bits) {
        int some = bits - done > 12 ? 12 : bits - done;
        uint32_t part = slot_of(r, stream) >> (SCALE_BITS - some);
        advance(r, stream, part << (SCALE_BITS - some), 1u << (SCALE_BITS - some));
        value |= (uint64_t)part << done;
        done += some;
    }
    return value;
}

/* --- the model: what both sides know -------------------------------------------------------------- */

enum {
    SUB_BITS = 2, /* buckets of gaps: four to the octave */
    CONTEXTS = 48, /* expected gaps: two to the octave */
    SMALL_VALUES = 8,
    SIGN_CONTEXTS = 16,
    VALUE_SYMBOLS = SMALL_VALUES + 60, /* sizes 2 to 8, then by the highest bit, 3 to 63 */
    ONE = 1 << 16,
    LEAN_RATE = ONE / 6,
    OWN_RATE = ONE / 50
};

typedef struct {
    Table gaps[CONTEXTS];
    Table values[VALUE_EXPONENTS];
    uint16_t signs[SIGN_CONTEXTS]; /* shares of ups, by the lean */
    uint16_t ones[VALUE_EXPONENTS]; /* shares of steps by one, by the exponent */
    int64_t mean[CLASSES]; /* log2 of the gap, 16 fractional bits */
    uint32_t seen[CLASSES];
    int64_t lean;          /* of the signs of late: 0 for all up, ONE for all down */
    int gap_symbols;       /* the last one: no further change */
} Model;

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

/* log2(value + 1/2), 16 fractional bits; linear between 64 points to the octave. */
static int64_t compute_log2_half(uint64_t value)
{
    uint64_t twice = 2 * value + 1;
    int top = 63 - __builtin_clzll(twice);
    uint64_t fraction = top >= 22 ? twice >> (top - 22) : twice << (22 - top);
    fraction &= (1u << 22) - 1;
    uint32_t index = (uint32_t)(fraction >> 16), rest = (uint32_t)(fraction & 0xffff);
    uint32_t low = LOG2_FRACTION[index], high = LOG2_FRACTION[index + 1];
    return (int64_t)(top - 1) * ONE + low + (((int64_t)(high - low) * rest) >> 16);
}

enum { SMALL_LOGS = 1024 };

static int32_t small_logs[SMALL_LOGS]; /* filled by prepare */

static inline int64_t log2_half(uint64_t value)
{
    return value < SMALL_LOGS ? small_logs[value] : compute_log2_half(value);
}

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

static inline Table *gap_table(Model *m, int class)
{
    int64_t context = floor_shift(m->mean[class] + ONE / 4, 15);
    int k = context < 0 ? 0 : context >= CONTEXTS ? CONTEXTS - 1 : (int)context;
    if (m->gaps[k].symbols == 0)
        begin_gaps(&m->gaps[k], k, m->gap_symbols);
    return &m->gaps[k];
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

static inline uint16_t *sign_of(Model *m)
{
    int k = (int)(m->lean * SIGN_CONTEXTS >> 16);
    return &m->signs[k >= SIGN_CONTEXTS ? SIGN_CONTEXTS - 1 : k];
}

static void begin_model(Model *m, uint64_t elements, int first)
{
    int extra;
    memset(m, 0, sizeof *m);
    m->gap_symbols = bucket_of(elements, &extra) + 2;
    for (int k = 0; k < CLASSES; k++)
        m->mean[k] = (int64_t)first * (ONE / 4) + (int64_t)k * ONE;
    m->lean = ONE / 2;
    for (int k = 0; k < SIGN_CONTEXTS; k++)
        m->signs[k] = SCALE / 2;
    for (int k = 0; k < VALUE_EXPONENTS; k++)
        m->ones[k] = SCALE - SCALE / 8;
}

/* A change was seen: learn from its gap, before its value and the next gap are coded. */
static inline void saw(Model *m, int class, uint64_t gap)
{
    int64_t own = log2_half(gap) - m->mean[class];
    uint32_t n = m->seen[class] < 64 ? ++m->seen[class] : 64;
    int64_t rate = n < 50 ? ONE / (int64_t)(n + 1) : OWN_RATE;
    m->mean[class] += floor_shift(own * rate, 16);
}

static inline void learn_lean(Model *m, int negative)
{
    m->lean += floor_shift(((int64_t)negative * ONE - m->lean) * LEAN_RATE, 16);
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
    uint32_t since[LANES]; /* elements of the class after its last change; may wrap below zero */
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

static int find_one(Finder *f, uint64_t base, uint64_t next, uint32_t gap, Type type, int lowest)
{
    Event e;
    int exponent = exponent_of(base, type);
    e.difference = difference_of(base, next, type);
    if (e.difference == 0) /* someone is writing to what we read; the digests will tell */
        e.difference = 1;
    e.gap = gap;
    e.following = 0;
    e.class = (uint8_t)class_of(exponent, lowest);
    e.exponent = (uint8_t)value_exponent(exponent, lowest);
    return add_event(f, e);
}

static inline void find_portable(Finder *f, const uint8_t *base, const uint8_t *next, size_t count,
                                 Type type, int lowest)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t b = load(base + i * type.width, type.width);
        uint64_t n = load(next + i * type.width, type.width);
        int class = class_of(exponent_of(b, type), lowest);
        if (b != n) {
            if (!find_one(f, b, n, f->since[class], type, lowest))
                return;
            f->since[class] = 0;
        } else
            f->since[class]++;
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
#define AVX512 __attribute__((target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq")))

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

/* Eight blocks at a time: of each element the four bits of its class, and how many of each class there
 * are in each block. */
enum { BLOCKS = 8, STRETCH = BLOCKS * BLOCK };

typedef struct {
    uint64_t bit[4][BLOCKS];
    uint8_t sizes[BLOCKS][16]; /* by class; at most 64 */
} Stretch;

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
        v = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packus_epi16(a, b));
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

AVX512 static inline __attribute__((always_inline)) void
stretch_avx512(Stretch *s, const uint8_t *at, Type type, int lowest)
{
    for (int j = 0; j < BLOCKS; j++) {
        __m512i classes = classes_avx512(at + (size_t)j * BLOCK * (size_t)type.width, type, lowest);
        s->bit[0][j] = _mm512_test_epi8_mask(classes, _mm512_set1_epi8(1));
        s->bit[1][j] = _mm512_test_epi8_mask(classes, _mm512_set1_epi8(2));
        s->bit[2][j] = _mm512_test_epi8_mask(classes, _mm512_set1_epi8(4));
        s->bit[3][j] = _mm512_test_epi8_mask(classes, _mm512_set1_epi8(8));
    }
    __m512i a = _mm512_loadu_si512(s->bit[0]), b = _mm512_loadu_si512(s->bit[1]);
    __m512i c = _mm512_loadu_si512(s->bit[2]), d = _mm512_loadu_si512(s->bit[3]);
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
    /* lanes of 16 bytes, a block each: even ones, odd ones, and then in their order */
    __m512i even = _mm512_unpacklo_epi64(low, high), odd = _mm512_unpackhi_epi64(low, high);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(s->sizes[0], _mm512_permutex2var_epi64(even, first, odd));
    _mm512_storeu_si512(s->sizes[4], _mm512_permutex2var_epi64(even, second, odd));
}

/* Which elements of a block are of a class. */
static inline uint64_t members_of(const Stretch *s, int block, int class)
{
    uint64_t not0 = (uint64_t)(class & 1) - 1, not1 = (uint64_t)(class >> 1 & 1) - 1;
    uint64_t not2 = (uint64_t)(class >> 2 & 1) - 1, not3 = (uint64_t)(class >> 3 & 1) - 1;
    return (s->bit[0][block] ^ not0) & (s->bit[1][block] ^ not1) & (s->bit[2][block] ^ not2)
           & (s->bit[3][block] ^ not3);
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

/* Find what changed in whole stretches; return how many elements these are. */
AVX512 static inline __attribute__((always_inline)) size_t
find_avx512(Finder *f, const uint8_t *base, const uint8_t *next, size_t count, Type type, int lowest)
{
    size_t i = 0;
    Stretch s;
    __m512i since = _mm512_loadu_si512(f->since);
    for (; i + STRETCH <= count; i += STRETCH) {
        stretch_avx512(&s, base + i * (size_t)type.width, type, lowest);
        for (int j = 0; j < BLOCKS; j++) {
            size_t at = i + (size_t)j * BLOCK;
            const uint8_t *b = base + at * (size_t)type.width, *n = next + at * (size_t)type.width;
            uint64_t changed = changed_avx512(b, n, type.width);
            if (changed)
                _mm512_storeu_si512(f->since, since);
            while (changed) {
                int bit = __builtin_ctzll(changed);
                changed &= changed - 1;
                uint64_t old = load(b + bit * type.width, type.width);
                uint64_t new = load(n + bit * type.width, type.width);
                int class = class_of(exponent_of(old, type), lowest);
                uint64_t earlier = members_of(&s, j, class) & (((uint64_t)1 << bit) - 1);
                uint32_t before = (uint32_t)count_bits(earlier);
                if (!find_one(f, old, new, f->since[class] + before, type, lowest))
                    return count;
                f->since[class] = 0u - before - 1;
                since = _mm512_mask_set1_epi32(since, (__mmask16)(1u << class), (int)f->since[class]);
            }
            __m128i sizes = _mm_loadu_si128((const __m128i *)s.sizes[j]);
            since = _mm512_add_epi32(since, _mm512_cvtepu8_epi32(sizes));
        }
    }
    _mm512_storeu_si512(f->since, since);
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

/* The changes of a block. Leaves `since` counted from the block's start. */
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
        if (!find_one(f, old, new, f->since[class] + before, type, lowest))
            return 0;
        f->since[class] = 0u - before - 1;
    }
    return 1;
}

AVX2 static inline __attribute__((always_inline)) void
find_avx2(Finder *f, const uint8_t *base, const uint8_t *next, size_t count, Type type, int lowest)
{
    size_t i = 0;
    __m256i low = load_avx2((const uint8_t *)f->since);
    __m256i high = load_avx2((const uint8_t *)(f->since + 8));
    for (; i + BLOCK <= count; i += BLOCK) {
        const uint8_t *b = base + i * (size_t)type.width, *n = next + i * (size_t)type.width;
        uint64_t of[LANES] = {0};
        uint64_t changed = changed_avx2(b, n, type.width);
        members_avx2(b, type, lowest, of);
        if (changed) {
            _mm256_storeu_si256((__m256i *)f->since, low);
            _mm256_storeu_si256((__m256i *)(f->since + 8), high);
            if (!find_block_avx2(f, b, n, changed, of, type, lowest))
                return;
            low = load_avx2((const uint8_t *)f->since);
            high = load_avx2((const uint8_t *)(f->since + 8));
        }
        low = _mm256_add_epi32(low, sizes_avx2(of));
        high = _mm256_add_epi32(high, sizes_avx2(of + 8));
    }
    _mm256_storeu_si256((__m256i *)f->since, low);
    _mm256_storeu_si256((__m256i *)(f->since + 8), high);
    if (i < count)
        find_portable(f, base + i * (size_t)type.width, next + i * (size_t)type.width, count - i, type, lowest);
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

static void put_gap(Writer *w, Model *m, int class, const Event *event)
{
    Table *t = gap_table(m, class);
    if (event == NULL) {
        put_symbol(w, t, m->gap_symbols - 1);
        return;
    }
    int extra, symbol = bucket_of(event->gap, &extra);
    put_symbol(w, t, symbol);
    put_bits(w, (event->gap + (1u << SUB_BITS)) & (((uint64_t)1 << extra) - 1), extra);
}

static void put_value(Writer *w, Model *m, const Event *event)
{
    int bits, negative = event->difference < 0;
    uint64_t rest = 0, d = (uint64_t)event->difference, size = negative ? (uint64_t)0 - d : d;
    put_bit(w, &m->ones[event->exponent], size > 1, ONE_RATE);
    if (size > 1) {
        put_symbol(w, value_table(m, event->exponent), value_symbol(size, &bits, &rest));
        put_bits(w, rest, bits);
    }
    put_bit(w, sign_of(m), negative, SIGN_RATE);
    learn_lean(m, negative);
}

/* Write what decode reads: for each class its first gap, then for each change its value and the next
 * gap of its class. */
static int write_events(Writer *gaps, Writer *values, Model *m, Finder *f)
{
    size_t first[CLASSES];
    for (int k = 0; k < CLASSES; k++)
        first[k] = f->count;
    for (size_t i = f->count; i-- > 0;) {
        f->events[i].following = (uint32_t)first[f->events[i].class];
        first[f->events[i].class] = i;
    }
    for (int k = 0; k < CLASSES; k++)
        put_gap(gaps, m, k, first[k] < f->count ? &f->events[first[k]] : NULL);
    for (size_t i = 0; i < f->count && !gaps->failed && !values->failed; i++) {
        const Event *e = &f->events[i];
        saw(m, e->class, e->gap);
        put_value(values, m, e);
        put_gap(gaps, m, e->class, e->following < f->count ? &f->events[e->following] : NULL);
    }
    return !gaps->failed && !values->failed;
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
static uint8_t *finish(const Writer *gaps, const Writer *values, size_t head, size_t *length)
{
    size_t most = gaps->count + values->count, room = head + 8 + 2 * most;
    uint8_t *bytes = malloc(room);
    if (bytes == NULL)
        return NULL;
    /* Values are read from the end: what is coded last lies last. */
    uint8_t *at = bytes + head;
    uint32_t state = STATE_LOW;
    for (size_t i = values->count; i-- > 0;) {
        if (is_full(state, values->ops[i])) {
            store(at, 2, state);
            at += 2;
            state >>= 16;
        }
        state = coded(state, values->ops[i]);
    }
    store(at, 4, state);
    uint8_t *middle = at + 4;
    /* Gaps from the beginning: coded from the end of the room on, then joined to the values. */
    at = bytes + room;
    state = STATE_LOW;
    for (size_t i = gaps->count; i-- > 0;) {
        if (is_full(state, gaps->ops[i])) {
            at -= 2;
            store(at, 2, state);
            state >>= 16;
        }
        state = coded(state, gaps->ops[i]);
    }
    at -= 4;
    store(at, 4, state);
    /* gaps | values: turn the two around */
    size_t of_values = (size_t)(middle - bytes) - head, of_gaps = (size_t)(bytes + room - at);
    uint8_t *joined = malloc(head + of_values + of_gaps);
    if (joined != NULL) {
        memcpy(joined + head, at, of_gaps);
        memcpy(joined + head + of_gaps, bytes + head, of_values);
        *length = head + of_gaps + of_values;
    }
    free(bytes);
    return joined;
}

/* --- applying changes ---------------------------------------------------------------------------- */

#define NEVER ((uint32_t)1 << 30) /* more elements than a frame has */

typedef struct {
    Reader *reader;
    Model *model;
    Type type;
    int lowest;
    uint32_t ahead[LANES]; /* elements of the class before its next change */
    uint32_t gap[LANES];   /* what `ahead` was when it was read */
    int wrong;
} Applier;

static inline __attribute__((always_inline)) uint32_t
get_gap(Applier *a, int class)
{
    int symbol = get_symbol(a->reader, GAPS, gap_table(a->model, class));
    if (symbol == a->model->gap_symbols - 1 || a->reader->over)
        return NEVER;
    int extra;
    uint64_t gap = bucket_start(symbol, &extra);
    gap += get_bits(a->reader, GAPS, extra);
    return gap < NEVER ? (uint32_t)gap : NEVER;
}

/* More than one, which is rare. */
static __attribute__((noinline)) uint64_t get_size(Applier *a, int exponent)
{
    int symbol = get_symbol(a->reader, VALUES, value_table(a->model, exponent));
    if (symbol <= SMALL_VALUES - 2)
        return (uint64_t)symbol + 2;
    int top = symbol - (SMALL_VALUES - 4);
    return (uint64_t)1 << top | get_bits(a->reader, VALUES, top);
}

static inline __attribute__((always_inline)) int64_t
get_value(Applier *a, int exponent)
{
    uint64_t size = 1;
    if (get_bit(a->reader, VALUES, &a->model->ones[exponent], ONE_RATE))
        size = get_size(a, exponent);
    int negative = get_bit(a->reader, VALUES, sign_of(a->model), SIGN_RATE);
    learn_lean(a->model, negative);
    uint64_t all = (uint64_t)0 - (uint64_t)negative;
    return (int64_t)((size ^ all) - all);
}

/* The element at `at`, of `class`, changes. Leaves in `gap` how many elements of the class come before
 * the next change. */
static inline __attribute__((always_inline)) void
apply_one(Applier *a, uint8_t *at, uint64_t old, int class, Type type)
{
    saw(a->model, class, a->gap[class]);
    int64_t d = get_value(a, value_exponent(exponent_of(old, type), a->lowest));
    store(at, type.width, from_order(to_order(old, type) + (uint64_t)d, type));
    a->gap[class] = get_gap(a, class);
}

static inline void apply_portable(Applier *a, const uint8_t *base, uint8_t *out, size_t count,
                                  Type type)
{
    memcpy(out, base, count * (size_t)type.width);
    for (size_t i = 0; i < count; i++) {
        uint64_t old = load(base + i * type.width, type.width);
        int class = class_of(exponent_of(old, type), a->lowest);
        if (a->ahead[class]-- == 0) {
            apply_one(a, out + i * type.width, old, class, type);
            a->ahead[class] = a->gap[class];
        }
    }
}

#if HAVE_AVX2_PATH
AVX2 static inline uint32_t nth_bit(uint64_t bits, uint32_t n)
{
    return (uint32_t)__builtin_ctzll(_pdep_u64((uint64_t)1 << n, bits));
}

/* A block in which changes are due: of those classes whose next one comes before its end. Leaves
 * `ahead` counted from the block's start. */
AVX2 static void apply_block_avx2(Applier *a, const uint8_t *b, uint8_t *o, const uint64_t *of,
                                  uint32_t due, Type type)
{
    while (due) {
        int class = 0;
        uint32_t bit = BLOCK;
        for (uint32_t left = due; left; left &= left - 1) {
            int k = __builtin_ctz(left);
            uint32_t at = nth_bit(of[k], a->ahead[k]);
            if (at < bit) {
                bit = at;
                class = k;
            }
        }
        uint64_t old = load(b + bit * (size_t)type.width, type.width);
        apply_one(a, o + bit * (size_t)type.width, old, class, type);
        a->ahead[class] += 1 + a->gap[class];
        if (a->ahead[class] >= count_bits(of[class]))
            due &= ~((uint32_t)1 << class);
    }
}

AVX2 static inline __attribute__((always_inline)) void
apply_avx2(Applier *a, const uint8_t *base, uint8_t *out, size_t count, Type type)
{
    size_t i = 0;
    __m256i low = load_avx2((const uint8_t *)a->ahead);
    __m256i high = load_avx2((const uint8_t *)(a->ahead + 8));
    for (; i + BLOCK <= count; i += BLOCK) {
        const uint8_t *b = base + i * (size_t)type.width;
        uint8_t *o = out + i * (size_t)type.width;
        uint64_t of[LANES] = {0};
        for (int j = 0; j < BLOCK * type.width; j += 32)
            _mm256_storeu_si256((__m256i *)(o + j), load_avx2(b + j));
        members_avx2(b, type, a->lowest, of);
        __m256i low_sizes = sizes_avx2(of), high_sizes = sizes_avx2(of + 8);
        __m256i low_due = _mm256_cmpgt_epi32(low_sizes, low), high_due = _mm256_cmpgt_epi32(high_sizes, high);
        uint32_t due = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low_due))
                       | (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(high_due)) << 8;
        if (due) {
            _mm256_storeu_si256((__m256i *)a->ahead, low);
            _mm256_storeu_si256((__m256i *)(a->ahead + 8), high);
            apply_block_avx2(a, b, o, of, due, type);
            low = load_avx2((const uint8_t *)a->ahead);
            high = load_avx2((const uint8_t *)(a->ahead + 8));
        }
        low = _mm256_sub_epi32(low, low_sizes);
        high = _mm256_sub_epi32(high, high_sizes);
    }
    _mm256_storeu_si256((__m256i *)a->ahead, low);
    _mm256_storeu_si256((__m256i *)(a->ahead + 8), high);
    if (i < count)
        apply_portable(a, base + i * (size_t)type.width, out + i * (size_t)type.width, count - i, type);
}

#if HAVE_AVX512_PATH
/* Apply what changes in whole stretches; return how many elements these are. */
AVX512 static inline __attribute__((always_inline)) size_t
apply_avx512(Applier *a, const uint8_t *base, uint8_t *out, size_t count, Type type)
{
    size_t i = 0;
    Stretch s;
    __m512i ahead = _mm512_loadu_si512(a->ahead);
    for (; i + STRETCH <= count; i += STRETCH) {
        stretch_avx512(&s, base + i * (size_t)type.width, type, a->lowest);
        for (int j = 0; j < BLOCKS; j++) {
            size_t at = i + (size_t)j * BLOCK;
            const uint8_t *b = base + at * (size_t)type.width;
            uint8_t *o = out + at * (size_t)type.width;
            for (int k = 0; k < type.width; k++)
                _mm512_storeu_si512(o + 64 * k, _mm512_loadu_si512(b + 64 * k));
            __m512i sizes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)s.sizes[j]));
            uint32_t due = number_of_16(_mm512_cmpgt_epi32_mask(sizes, ahead));
            if (due)
                _mm512_storeu_si512(a->ahead, ahead);
            while (due) {
                int class = 0;
                uint32_t bit = BLOCK;
                for (uint32_t left = due; left; left &= left - 1) {
                    int k = __builtin_ctz(left);
                    uint32_t place = nth_bit(members_of(&s, j, k), a->ahead[k]);
                    if (place < bit) {
                        bit = place;
                        class = k;
                    }
                }
                uint64_t old = load(b + bit * (size_t)type.width, type.width);
                apply_one(a, o + bit * (size_t)type.width, old, class, type);
                a->ahead[class] += 1 + a->gap[class];
                ahead = _mm512_mask_set1_epi32(ahead, (__mmask16)(1u << class), (int)a->ahead[class]);
                if (a->ahead[class] >= s.sizes[j][class])
                    due &= ~((uint32_t)1 << class);
            }
            ahead = _mm512_sub_epi32(ahead, sizes);
        }
    }
    _mm512_storeu_si512(a->ahead, ahead);
    return i;
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
    Writer gaps, values;
    memset(&f, 0, sizeof f);
    memset(&gaps, 0, sizeof gaps);
    memset(&values, 0, sizeof values);
    f.most = most;
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
            int64_t mean = log2_half(elements / f.count / 32);
            first = (int)(mean < 0 ? 0 : mean / (ONE / 4));
        }
        if (m != NULL) {
            begin_model(m, elements, first);
            if (write_events(&gaps, &values, m, &f))
                bytes = finish(&gaps, &values, HEAD, length);
            free(m);
        }
        if (bytes != NULL) {
            bytes[0] = (uint8_t)lowest;
            bytes[1] = (uint8_t)(lowest >> 8);
            bytes[2] = (uint8_t)first;
        }
    }
    free(f.events);
    free(gaps.ops);
    free(values.ops);
    return bytes;
}

/* Return 0, or -1 without memory, or 1 for bytes that encode never wrote. */
static int decode(const uint8_t *bytes, size_t length, const Segment *s, size_t segments, Type type)
{
    if (length < HEAD + 8 || (bytes[0] | (uint64_t)bytes[1] << 8) > type.mask)
        return 1;
    Model *m = malloc(sizeof *m);
    if (m == NULL)
        return -1;
    uint64_t elements = 0;
    for (size_t i = 0; i < segments; i++)
        elements += s[i].count;
    Reader r = {bytes + HEAD + 4, bytes + length - 4, 0, 0, 0};
    r.gaps = (uint32_t)load(bytes + HEAD, 4);
    r.values = (uint32_t)load(bytes + length - 4, 4);
    Applier a;
    memset(&a, 0, sizeof a);
    a.reader = &r;
    a.model = m;
    a.type = type;
    a.lowest = bytes[0] | bytes[1] << 8;
    begin_model(m, elements, bytes[2]);
    for (int k = 0; k < CLASSES; k++)
        a.ahead[k] = a.gap[k] = get_gap(&a, k);
    apply(&a, s, segments);
    free(m);
    for (int k = 0; k < CLASSES; k++)
        a.wrong |= a.ahead[k] < NEVER / 2; /* a change was announced beyond the end */
    return a.wrong || r.over || r.low != r.high || r.gaps != STATE_LOW || r.values != STATE_LOW;
}

/* --- byte planes: for what changed so much that its places are not worth telling --------------------- */

/* Elements as the difference to the base in the order of the values, small ones of either sign as small
 * numbers; without a base the bits, the sign last, so that the exponent lies in the highest byte. */
static inline uint64_t to_plane(const uint8_t *base, const uint8_t *next, Type type)
{
    uint64_t sign = (uint64_t)1 << (8 * type.width - 1), all = sign | (sign - 1);
    uint64_t bits = load(next, type.width);
    if (base == NULL)
        return type.is_float ? (bits << 1 | bits >> (8 * type.width - 1)) & all : bits;
    uint64_t d = (to_order(bits, type) - to_order(load(base, type.width), type)) & all;
    return (d << 1 ^ (d & sign ? all : 0)) & all;
}

static inline uint64_t from_plane(const uint8_t *base, uint64_t value, Type type)
{
    uint64_t sign = (uint64_t)1 << (8 * type.width - 1), all = sign | (sign - 1);
    if (base == NULL)
        return type.is_float ? (value >> 1 | (value & 1 ? sign : 0)) & all : value;
    uint64_t d = (value >> 1 ^ (value & 1 ? all : 0)) & all;
    return from_order(to_order(load(base, type.width), type) + d, type);
}

enum { WIDEST = 8 };

typedef struct {
    uint8_t *at[WIDEST]; /* written by split, read by merge; the lowest byte first */
} Planes;

static inline void split_portable(const Segment *s, const Planes *p, size_t from, Type type)
{
    for (size_t j = from; j < s->count; j++) {
        size_t at = j * (size_t)type.width;
        uint64_t v = to_plane(s->base ? s->base + at : NULL, s->next + at, type);
        for (int k = 0; k < type.width; k++)
            p->at[k][j] = (uint8_t)(v >> (8 * k));
    }
}

static inline void merge_portable(const Segment *s, const Planes *p, size_t from, Type type)
{
    for (size_t j = from; j < s->count; j++) {
        size_t at = j * (size_t)type.width;
        uint64_t v = 0;
        for (int k = 0; k < type.width; k++)
            v |= (uint64_t)p->at[k][j] << (8 * k);
        store(s->out + at, type.width, from_plane(s->base ? s->base + at : NULL, v, type));
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

VECTOR to_plane_of(const uint8_t *base, const uint8_t *next, Type type)
{
    __m256i bits = load_avx2(next);
    if (base == NULL && !type.is_float)
        return bits;
    if (base == NULL) /* the sign, all ones, subtracted: one added */
        return sub_of(add_of(bits, bits, type.width), negative_of(bits, type.width), type.width);
    __m256i d = sub_of(to_order_of(bits, type), to_order_of(load_avx2(base), type), type.width);
    return _mm256_xor_si256(add_of(d, d, type.width), negative_of(d, type.width));
}

VECTOR from_plane_of(const uint8_t *base, __m256i v, Type type)
{
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
split_avx2(const Segment *s, const Planes *p, Type type)
{
    const int width = type.width;
    size_t j = 0;
    for (; j + 32 <= s->count; j += 32) {
        const uint8_t *n = s->next + j * (size_t)width, *b = s->base ? s->base + j * (size_t)width : NULL;
        __m256i v[4];
        for (int k = 0; k < width; k++)
            v[k] = to_plane_of(b ? b + 32 * k : NULL, n + 32 * k, type);
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
merge_avx2(const Segment *s, const Planes *p, Type type)
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
            SAVE(o + 32 * k, from_plane_of(b ? b + 32 * k : NULL, v[k], type));
    }
    return j;
}

/* Constants for width and sort make tight loops. */
#define BY_VECTORS(call)                                                                            \
    if (type.is_float) {                                                                            \
        type.is_float = 1;                                                                          \
        switch (type.width) {                                                                       \
        case 1: type.width = 1; return call;                                                        \
        case 2: type.width = 2; return call;                                                        \
        case 4: type.width = 4; return call;                                                        \
        default: return 0;                                                                          \
        }                                                                                           \
    }                                                                                               \
    type.is_float = 0;                                                                              \
    switch (type.width) {                                                                           \
    case 1: type.width = 1; return call;                                                            \
    case 2: type.width = 2; return call;                                                            \
    case 4: type.width = 4; return call;                                                            \
    default: return 0;                                                                              \
    }

AVX2 static size_t split_segment_avx2(const Segment *s, const Planes *p, Type type)
{
    BY_VECTORS(split_avx2(s, p, type))
}

AVX2 static size_t merge_segment_avx2(const Segment *s, const Planes *p, Type type)
{
    BY_VECTORS(merge_avx2(s, p, type))
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
    BY_WIDTH(split_portable(s, p, done, type))
}

static void merge_segment(const Segment *s, const Planes *p, Type type)
{
    size_t done = 0;
#if HAVE_AVX2_PATH
    if (path >= WITH_AVX2)
        done = merge_segment_avx2(s, p, type);
#endif
    BY_WIDTH(merge_portable(s, p, done, type))
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
    for (uint64_t i = 0; i < SMALL_LOGS; i++)
        small_logs[i] = (int32_t)compute_log2_half(i);
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
        && __builtin_cpu_supports("avx512vpopcntdq"))
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
"split_planes(type, segments, planes, /)\n--\n\n"
"Write elements (or their difference to the base) as byte planes, a buffer each, the lowest byte first.");

PyDoc_STRVAR(merge_doc,
"merge_planes(type, segments, planes, /)\n--\n\n"
"Write elements from byte planes: the inverse of split_planes.");

static PyObject *planes(PyObject *args, int split)
{
    int type, held = 0;
    PyObject *list, *buffers, *result = NULL;
    Py_buffer views[WIDEST];
    Planes p;
    Segments g;
    if (!PyArg_ParseTuple(args, "iOO", &type, &list, &buffers) || take(&g, list, type, !split) < 0)
        return NULL;
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
