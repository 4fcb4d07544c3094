/* Feeds the kernel random and damaged input, on all of its paths, under sanitizers.
 *
 * usage: fuzz_kernel SEED ROUNDS       Every buffer has its exact size and any alignment, so that one byte
 * too far is seen. Prints what it did; aborts at the first difference, with the round to repeat.
 */
#define KERNEL_WITHOUT_PYTHON
#include "../../../shardcast/codec/_kernel.c"

#include <stdio.h>

static uint64_t chance;

static uint64_t any(void) /* xorshift64* (Vigna 2016) */
{
    chance ^= chance >> 12;
    chance ^= chance << 25;
    chance ^= chance >> 27;
    return chance * 0x2545f4914f6cdd1dull;
}

static uint64_t below(uint64_t limit)
{
    return any() % limit;
}

static uint64_t round_number;

static void check(int good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "round %llu: %s\n", (unsigned long long)round_number, what);
    abort();
}

enum { MOST_SEGMENTS = 5 };

typedef struct {
    uint8_t *held[3 * MOST_SEGMENTS];
    size_t buffers;
    Segment s[MOST_SEGMENTS];
    uint8_t *other[MOST_SEGMENTS];
    size_t count, elements;
    Type type;
} Case;

static uint8_t *buffer(Case *c, size_t size)
{
    size_t skip = below(9);
    uint8_t *held = malloc(size + skip + (size + skip == 0));
    check(held != NULL, "no memory");
    c->held[c->buffers++] = held;
    return held + skip;
}

static size_t some_count(void)
{
    static const size_t BORDERS[] = {0, 1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 129, 191, 192, 193, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025, 1087, 1088, 1089};
    switch (below(8)) {
    case 0: return below(8);
    case 1: return 200 + below(4000);
    case 2: return below(300);
    default: return BORDERS[below(sizeof BORDERS / sizeof *BORDERS)];
    }
}

static uint64_t some_bits(int style, Type type)
{
    uint64_t bits = any();
    switch (style) {
    case 0: return bits;
    case 1: return 0;
    default: /* like weights: exponents near each other, half as many of each smaller one */
        if (type.mask == 0)
            return bits;
        int exponent = (int)(type.mask / 2) - __builtin_ctzll(any() | 1ull << 20);
        exponent = exponent < 0 ? 0 : exponent;
        return (bits & ~(type.mask << type.shift)) | (uint64_t)exponent << type.shift;
    }
}

static void make(Case *c)
{
    memset(c, 0, sizeof *c);
    c->type = TYPE[below(TYPES)];
    c->count = 1 + below(MOST_SEGMENTS);
    int style = (int)below(4), sort = (int)below(5);
    uint64_t one_in = (uint64_t[]){1, 2, 10, 200, 5000}[below(5)];
    for (size_t i = 0; i < c->count; i++) {
        size_t count = some_count(), size = count * (size_t)c->type.width;
        uint8_t *base = buffer(c, size), *next = buffer(c, size);
        c->other[i] = buffer(c, size);
        for (size_t j = 0; j < count; j++) {
            uint64_t bits = some_bits(style, c->type), new = bits;
            if (below(one_in) == 0)
                switch (sort) {
                case 0: new = any(); break;
                case 1: new = from_order(to_order(bits, c->type) + 1, c->type); break;
                case 2: new = from_order(to_order(bits, c->type) - 1 - below(40), c->type); break;
                case 3: new = bits ^ (uint64_t)1 << below((uint64_t)(8 * c->type.width)); break;
                default: new = 0;
                }
            store(base + j * (size_t)c->type.width, c->type.width, bits);
            store(next + j * (size_t)c->type.width, c->type.width, new);
        }
        c->s[i] = (Segment){base, c->other[i], next, count};
        c->elements += count;
    }
}

static void drop(Case *c)
{
    for (size_t i = 0; i < c->buffers; i++)
        free(c->held[i]);
}

static void spoil(Case *c)
{
    for (size_t i = 0; i < c->count; i++)
        memset(c->other[i], 0xa5, c->s[i].count * (size_t)c->type.width);
}

static int rebuilt(const Case *c)
{
    for (size_t i = 0; i < c->count; i++)
        if (memcmp(c->other[i], c->s[i].next, c->s[i].count * (size_t)c->type.width) != 0)
            return 0;
    return 1;
}

static uint64_t sum_of(const Case *c)
{
    uint64_t sum = 1469598103934665603ull; /* FNV-1a */
    for (size_t i = 0; i < c->count; i++)
        for (size_t j = 0; j < c->s[i].count * (size_t)c->type.width; j++)
            sum = (sum ^ c->other[i][j]) * 1099511628211ull;
    return sum;
}

static int paths; /* that this processor has */
enum { MOST_PATHS = 3 };

/* Decode on all paths; they must agree, also about damage. */
static int decode_all(Case *c, const uint8_t *payload, size_t length)
{
    int rc[MOST_PATHS] = {0};
    uint64_t sum[MOST_PATHS] = {0};
    for (path = 0; path < paths; path++) {
        spoil(c);
        rc[path] = decode(payload, length, c->s, c->count, c->type);
        sum[path] = sum_of(c);
        check(rc[path] >= 0, "no memory");
    }
    for (int k = 1; k < paths; k++) {
        check(!rc[0] == !rc[k], "one path refuses what another takes");
        check(rc[0] || sum[0] == sum[k], "the paths decode differently");
    }
    return rc[0] == 0;
}

static uint64_t refused, taken;

static void damage(Case *c, const uint8_t *good, size_t length)
{
    size_t size = length;
    switch (below(4)) {
    case 0: size = below(length + 1); break;
    case 1: size = length + below(9); break;
    case 2: size = below(200); break;
    default: break;
    }
    uint8_t *payload = malloc(size + (size == 0));
    check(payload != NULL, "no memory");
    int noise = below(4) == 0;
    for (size_t i = 0; i < size; i++)
        payload[i] = noise || i >= length ? (uint8_t)any() : good[i];
    if (noise && size > 2 && below(2)) /* else nearly all are refused at once */
        payload[1] = 0, payload[0] = (uint8_t)below(c->type.mask + 1);
    for (uint64_t flips = below(5); flips && size; flips--)
        payload[below(size)] ^= (uint8_t)(1u << below(8));
    if (decode_all(c, payload, size))
        taken++;
    else
        refused++;
    free(payload);
}

static void changes(Case *c)
{
    uint8_t *bytes[MOST_PATHS];
    size_t length[MOST_PATHS];
    int full;
    for (path = 0; path < paths; path++) {
        bytes[path] = encode(c->s, c->count, c->type, c->elements, &length[path], &full);
        check(bytes[path] != NULL && !full, "not encoded");
    }
    for (int k = 1; k < paths; k++)
        check(length[0] == length[k] && memcmp(bytes[0], bytes[k], length[0]) == 0, "the paths encode differently");
    if (length[0] == 0) {
        for (size_t i = 0; i < c->count; i++)
            memcpy(c->other[i], c->s[i].base, c->s[i].count * (size_t)c->type.width);
        check(rebuilt(c), "not the same");
    } else {
        check(decode_all(c, bytes[0], length[0]) && rebuilt(c), "not what was encoded");
        /* One change too many is noticed, on all paths. */
        for (path = 0; path < paths; path++) {
            size_t unused;
                uint8_t *none = encode(c->s, c->count, c->type, 0, &unused, &full);
            check(none == NULL && full, "changes that are not there");
        }
    }
    for (int i = 0; i < 4; i++)
        damage(c, bytes[0], length[0]);
    for (int k = 0; k < paths; k++)
        free(bytes[k]);
}

static void byte_planes(Case *c, int way)
{
    Segment s[MOST_SEGMENTS];
    memcpy(s, c->s, sizeof s);
    int bare = way == IN_ORDER && below(2) == 0;
    for (size_t i = 0; i < c->count && bare; i++)
        s[i].base = NULL;
    Planes p[MOST_PATHS];
    uint8_t *held[MOST_PATHS][WIDEST];
    for (path = 0; path < paths; path++) {
        memset(&p[path], 0, sizeof p[path]);
        p[path].way = way;
        for (int k = 0; k < c->type.width; k++) {
            held[path][k] = malloc(c->elements + (c->elements == 0));
            check(held[path][k] != NULL, "no memory");
            p[path].at[k] = held[path][k];
        }
        do_planes(s, c->count, p[path], c->type, split_segment);
    }
    for (int other = 1; other < paths; other++)
        for (int k = 0; k < c->type.width; k++)
            check(memcmp(held[0][k], held[other][k], c->elements) == 0, "the paths split differently");
    for (path = 0; path < paths; path++) {
        spoil(c);
        do_planes(s, c->count, p[path], c->type, merge_segment);
        check(rebuilt(c), "planes are not what was split");
    }
    for (path = 0; path < paths; path++)
        for (int k = 0; k < c->type.width; k++)
            free(held[path][k]);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    prepare();
    paths = best_path() + 1;
    uint64_t seed = strtoull(argv[1], NULL, 10), rounds = strtoull(argv[2], NULL, 10);
    for (round_number = 0; round_number < rounds; round_number++) {
        chance = (seed << 32) + round_number + 0x9e3779b97f4a7c15ull;
        for (int i = 0; i < 4; i++)
            any();
        Case c;
        make(&c);
        changes(&c);
        byte_planes(&c, (int)below(WAYS));
        drop(&c);
    }
    printf("%llu rounds, %d paths; damaged payloads: %llu refused, %llu taken\n", (unsigned long long)rounds,
           paths, (unsigned long long)refused, (unsigned long long)taken);
    return 0;
}
