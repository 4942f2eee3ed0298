/* Segments for torch, carved out of address ranges that Tonnage hands over.
 *
 * Torch's caching allocator calls alloc and free while it holds its own lock. A callback into Python would then wait
 * for the GIL, whose holder may be waiting for that lock; so this is C that never calls back. It knows neither Python
 * nor CUDA: a heap is a range of numbers, and everything it did is written to a ring that Python reads when it likes.
 *
 * The bytes behind the addresses are never touched. All tables are static and bounded; a full one is a refusal.
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define VERSION 1
#define EACH_HEAP(DO) \
    DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)

enum { NUM_HEAPS = 16, MAX_SEGMENTS = 8192, NUM_EVENTS = 4096 };
enum { OK = 0, NO_SUCH_HEAP = -1, IN_USE = -2, BAD_RANGE = -3 };
enum { ALLOCATED = 1, FREED = 2, REFUSED = 3, UNKNOWN_FREED = 4 };

/* One thing that happened. A live segment is kept as the event that made it. */
struct event {
    uint64_t sequence; /* numbers the events of one heap from 0 */
    uint64_t at_ns;    /* CLOCK_MONOTONIC */
    uint64_t address;
    uint64_t bytes; /* what it takes, whole alignments */
    uint64_t asked_bytes;
    uint64_t stream;
    int32_t kind;
    int32_t device;
};

struct state {
    uint64_t next_sequence;
    uint64_t limit_bytes;
    uint64_t live_bytes;
    uint64_t high_bytes;
    uint64_t top_bytes; /* end of the last segment, from the base: the lowest limit that is possible now */
    uint64_t largest_hole_bytes;
    uint64_t num_segments;
    uint64_t num_allocated;
    uint64_t num_freed;
    uint64_t num_refused;
    uint64_t num_unknown_frees;
    uint64_t num_lost; /* events that were overwritten before anybody read them */
};

struct heap {
    int is_open;
    int32_t device;
    uint64_t base, align;
    uint64_t next_unread;
    struct state counts; /* top_bytes and largest_hole_bytes are worked out when asked for */
    struct event segments[MAX_SEGMENTS]; /* live, by rising address; what lies between them is free */
    struct event ring[NUM_EVENTS];
};

#define UNLOCKED(n) PTHREAD_MUTEX_INITIALIZER,
static pthread_mutex_t locks[NUM_HEAPS] = {EACH_HEAP(UNLOCKED)};
static struct heap heaps[NUM_HEAPS];

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The oldest unread event gives way: totals are kept apart and stay exact. */
static void record(struct heap *heap, const struct event *event) {
    if (heap->counts.next_sequence - heap->next_unread == NUM_EVENTS) {
        heap->next_unread++;
        heap->counts.num_lost++;
    }
    heap->ring[heap->counts.next_sequence++ % NUM_EVENTS] = *event;
}

/* First fit: low addresses fill up first, so the tail is what comes free and can be given back. Returns the place in
 * the table, or MAX_SEGMENTS where no hole is large enough. */
static size_t find_hole(const struct heap *heap, uint64_t bytes, uint64_t *address) {
    size_t num = (size_t)heap->counts.num_segments;
    uint64_t start = heap->base;
    for (size_t i = 0; i < num; i++) {
        if (heap->segments[i].address - start >= bytes) {
            *address = start;
            return i;
        }
        start = heap->segments[i].address + heap->segments[i].bytes;
    }
    *address = start;
    return heap->base + heap->counts.limit_bytes - start >= bytes ? num : MAX_SEGMENTS;
}

static void *allocate(int number, ssize_t size, int device, void *stream) {
    struct heap *heap = &heaps[number];
    struct event made = {
        .asked_bytes = size > 0 ? (uint64_t)size : 0, .stream = (uintptr_t)stream, .kind = REFUSED, .device = device};
    pthread_mutex_lock(&locks[number]);
    struct state *counts = &heap->counts;
    made.sequence = counts->next_sequence;
    made.at_ns = now_ns();
    /* The second test also keeps the rounding from overflowing. */
    if (heap->is_open && size > 0 && made.asked_bytes <= counts->limit_bytes && device == heap->device &&
        counts->num_segments < MAX_SEGMENTS) {
        uint64_t bytes = (made.asked_bytes + heap->align - 1) / heap->align * heap->align;
        size_t place = find_hole(heap, bytes, &made.address);
        if (place < MAX_SEGMENTS) {
            made.kind = ALLOCATED;
            made.bytes = bytes;
            memmove(&heap->segments[place + 1], &heap->segments[place],
                    ((size_t)counts->num_segments - place) * sizeof made);
            heap->segments[place] = made;
            counts->num_segments++;
            counts->num_allocated++;
            counts->live_bytes += bytes;
            if (counts->live_bytes > counts->high_bytes) counts->high_bytes = counts->live_bytes;
        }
    }
    if (made.kind == REFUSED) {
        made.address = 0;
        counts->num_refused++;
    }
    record(heap, &made);
    pthread_mutex_unlock(&locks[number]);
    return (void *)(uintptr_t)made.address; /* null is how torch is told that memory is out */
}

static size_t find_segment(const struct heap *heap, uint64_t address) {
    size_t low = 0, high = (size_t)heap->counts.num_segments;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (heap->segments[middle].address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < heap->counts.num_segments && heap->segments[low].address == address ? low : MAX_SEGMENTS;
}

static void release(int number, void *pointer, size_t size, int device, void *stream) {
    struct heap *heap = &heaps[number];
    struct event gone = {.address = (uintptr_t)pointer, .asked_bytes = size, .stream = (uintptr_t)stream,
                         .kind = UNKNOWN_FREED, .device = device};
    if (pointer == NULL) return;
    pthread_mutex_lock(&locks[number]);
    gone.sequence = heap->counts.next_sequence;
    gone.at_ns = now_ns();
    size_t place = find_segment(heap, gone.address);
    if (place < MAX_SEGMENTS) {
        gone.kind = FREED;
        gone.bytes = heap->segments[place].bytes;
        gone.asked_bytes = heap->segments[place].asked_bytes;
        memmove(&heap->segments[place], &heap->segments[place + 1],
                ((size_t)heap->counts.num_segments - place - 1) * sizeof gone);
        heap->counts.num_segments--;
        heap->counts.num_freed++;
        heap->counts.live_bytes -= gone.bytes;
    } else {
        heap->counts.num_unknown_frees++;
    }
    record(heap, &gone);
    pthread_mutex_unlock(&locks[number]);
}

static uint64_t top_bytes(const struct heap *heap) {
    if (heap->counts.num_segments == 0) return 0;
    const struct event *last = &heap->segments[heap->counts.num_segments - 1];
    return last->address + last->bytes - heap->base;
}

static void fill_state(const struct heap *heap, struct state *out) {
    uint64_t start = heap->base, largest = 0;
    for (size_t i = 0; i < heap->counts.num_segments; i++) {
        if (heap->segments[i].address - start > largest) largest = heap->segments[i].address - start;
        start = heap->segments[i].address + heap->segments[i].bytes;
    }
    uint64_t tail = heap->base + heap->counts.limit_bytes - start;
    *out = heap->counts;
    out->top_bytes = top_bytes(heap);
    out->largest_hole_bytes = tail > largest ? tail : largest;
}

static int is_heap(int number) { return number >= 0 && number < NUM_HEAPS; }

EXPORT int tonnage_version(void) { return VERSION; }
EXPORT int tonnage_num_heaps(void) { return NUM_HEAPS; }
EXPORT int tonnage_num_events(void) { return NUM_EVENTS; }
EXPORT int tonnage_max_segments(void) { return MAX_SEGMENTS; }

/* Base and limit are multiples of align, and so is every segment: none needs padding. */
EXPORT int tonnage_open(int number, int device, uint64_t base, uint64_t limit_bytes, uint64_t align) {
    if (!is_heap(number)) return NO_SUCH_HEAP;
    if (base == 0 || align == 0 || base % align != 0 || limit_bytes % align != 0 || limit_bytes > UINT64_MAX / 2 - base)
        return BAD_RANGE;
    int result = IN_USE;
    pthread_mutex_lock(&locks[number]);
    if (!heaps[number].is_open) {
        struct heap *heap = &heaps[number];
        heap->is_open = 1;
        heap->device = device;
        heap->base = base;
        heap->align = align;
        heap->next_unread = 0;
        heap->counts = (struct state){.limit_bytes = limit_bytes};
        result = OK;
    }
    pthread_mutex_unlock(&locks[number]);
    return result;
}

EXPORT int tonnage_set_limit(int number, uint64_t limit_bytes) {
    if (!is_heap(number)) return NO_SUCH_HEAP;
    struct heap *heap = &heaps[number];
    int result = OK;
    pthread_mutex_lock(&locks[number]);
    if (!heap->is_open)
        result = NO_SUCH_HEAP;
    else if (limit_bytes % heap->align != 0 || limit_bytes > UINT64_MAX / 2 - heap->base)
        result = BAD_RANGE;
    else if (limit_bytes < top_bytes(heap))
        result = IN_USE;
    else
        heap->counts.limit_bytes = limit_bytes;
    pthread_mutex_unlock(&locks[number]);
    return result;
}

EXPORT int tonnage_close(int number) {
    if (!is_heap(number)) return NO_SUCH_HEAP;
    struct heap *heap = &heaps[number];
    int result = OK;
    pthread_mutex_lock(&locks[number]);
    if (!heap->is_open)
        result = NO_SUCH_HEAP;
    else if (heap->counts.num_segments != 0)
        result = IN_USE;
    else {
        heap->is_open = 0;
        heap->counts.limit_bytes = 0; /* a pool that outlives its heap is refused */
    }
    pthread_mutex_unlock(&locks[number]);
    return result;
}

/* The oldest unread events, at most max_events; returns how many. Fewer than that: the state belongs to the last. */
EXPORT int tonnage_drain(int number, struct event *events, int max_events, struct state *state) {
    if (!is_heap(number)) return NO_SUCH_HEAP;
    struct heap *heap = &heaps[number];
    int num = 0;
    pthread_mutex_lock(&locks[number]);
    while (num < max_events && heap->next_unread < heap->counts.next_sequence)
        events[num++] = heap->ring[heap->next_unread++ % NUM_EVENTS];
    fill_state(heap, state);
    pthread_mutex_unlock(&locks[number]);
    return num;
}

/* The live segments by address, as the events that made them, and the state they belong to. */
EXPORT int tonnage_segments(int number, struct event *segments, int max_segments, struct state *state) {
    if (!is_heap(number)) return NO_SUCH_HEAP;
    struct heap *heap = &heaps[number];
    pthread_mutex_lock(&locks[number]);
    size_t num = (size_t)heap->counts.num_segments;
    if (max_segments < 0 || num > (size_t)max_segments) num = max_segments < 0 ? 0 : (size_t)max_segments;
    memcpy(segments, heap->segments, num * sizeof *segments);
    fill_state(heap, state);
    pthread_mutex_unlock(&locks[number]);
    return (int)num;
}

/* Torch takes two plain functions, without a pointer of ours: one pair for each heap. */
#define ENTRY(n)                                                                             \
    EXPORT void *tonnage_alloc_##n(ssize_t size, int device, void *stream) {                 \
        return allocate(n, size, device, stream);                                            \
    }                                                                                        \
    EXPORT void tonnage_free_##n(void *pointer, size_t size, int device, void *stream) {     \
        release(n, pointer, size, device, stream);                                           \
    }
EACH_HEAP(ENTRY)
