/* The limit: each collective as one loop in C over shared memory, without Python and without a library.
 *
 * Every rank maps the two buffers of all ranks, so an operation reads its inputs and writes its results where they lie.
 * Ranks wait by flags: each writes the number of its step into a cache line of its own, and reads those of the others.
 * bench/peers/calls/compiled.py compiles this file, and calls the functions below.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 64, LINE = 64, SLOT = 8192, SPINS = 4000 };
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL, SENDRECV, BARRIER };
enum { FP32, BF16 };

/* A rank's memory: its flag, two slots for short messages, and its two buffers. */
typedef struct { volatile uint64_t flag; char rest[LINE - 8]; char slot[2][SLOT]; } Head;

static int rank_, size_;
static uint64_t step_;
static Head *heads[MOST_RANKS];
static char *sends[MOST_RANKS], *recvs[MOST_RANKS];

/* Two short loops on one core would wait for each other's time slice, so each rank takes a core if there are enough. */
static void take_a_core(void) {
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) < size_) return;
    int core = -1;
    for (int found = -1; found < rank_;) found += CPU_ISSET(++core, &all) ? 1 : 0;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
}

const char *open_group(int rank, int size, const char *folder, size_t capacity, void **send, void **recv) {
    char name[512], target[512];
    size_t head = (sizeof(Head) + 4095) / 4096 * 4096, part = (capacity + 4095) / 4096 * 4096 + 4096;
    if (size > MOST_RANKS) return "runs on at most 64 ranks";
    int own = memfd_create("bench-c-loop", 0);
    if (own < 0 || ftruncate(own, head + 2 * part)) return "cannot get shared memory";
    rank_ = rank, size_ = size, step_ = 0;
    take_a_core();
    snprintf(target, sizeof target, "/proc/%d/fd/%d", (int)getpid(), own);
    snprintf(name, sizeof name, "%s/window%d", folder, rank);
    if (symlink(target, name)) return "cannot name its memory for the other ranks";
    for (int other = 0; other < size; other++) {
        int file = -1;
        snprintf(name, sizeof name, "%s/window%d", folder, other);
        for (int tries = 0; file < 0 && tries < 60000; tries++)
            if ((file = open(name, O_RDWR)) < 0) usleep(1000);
        char *base = file < 0 ? MAP_FAILED : mmap(0, head + 2 * part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
        if (base == MAP_FAILED) return "cannot map the memory of another rank";
        heads[other] = (Head *)base, sends[other] = base + head, recvs[other] = base + head + part;
        close(file);
    }
    *send = sends[rank], *recv = recvs[rank];
    return 0;
}

/* Wait until every rank has come to this step. */
static void meet(void) {
    uint64_t now = ++step_;
    __atomic_store_n(&heads[rank_]->flag, now, __ATOMIC_RELEASE);
    for (int other = 0; other < size_; other++)
        for (int spins = 0; __atomic_load_n(&heads[other]->flag, __ATOMIC_ACQUIRE) < now; spins++)
            if (spins < SPINS) __builtin_ia32_pause(); else sched_yield();
}

static inline float wide(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t narrow(float value) { /* to the nearest, ties to even; the inputs are finite */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

/* Sum elements [begin, end) of all inputs into all outputs. */
static void sum_fp32(char **from, char **to, int targets, size_t begin, size_t end) {
    for (size_t at = begin; at < end; at += 1024) {
        float part[1024];
        size_t count = end - at < 1024 ? end - at : 1024;
        memcpy(part, (float *)from[0] + at, 4 * count);
        for (int other = 1; other < size_; other++) {
            const float *input = (const float *)from[other] + at;
            for (size_t i = 0; i < count; i++) part[i] += input[i];
        }
        for (int other = 0; other < targets; other++) memcpy((float *)to[other] + at, part, 4 * count);
    }
}

static void sum_bf16(char **from, char **to, int targets, size_t begin, size_t end) {
    for (size_t at = begin; at < end; at += 1024) {
        float part[1024];
        uint16_t half[1024];
        size_t count = end - at < 1024 ? end - at : 1024;
        for (size_t i = 0; i < count; i++) part[i] = wide(((uint16_t *)from[0])[at + i]);
        for (int other = 1; other < size_; other++) {
            const uint16_t *input = (const uint16_t *)from[other] + at;
            for (size_t i = 0; i < count; i++) part[i] += wide(input[i]);
        }
        for (size_t i = 0; i < count; i++) half[i] = narrow(part[i]);
        for (int other = 0; other < targets; other++) memcpy((uint16_t *)to[other] + at, half, 2 * count);
    }
}

static void sum(int dtype, char **from, char **to, int targets, size_t begin, size_t end) {
    (dtype == FP32 ? sum_fp32 : sum_bf16)(from, to, targets, begin, end);
}

/* This rank's part of count elements, whole cache lines where there are enough. */
static void share(size_t count, size_t width, size_t *begin, size_t *end) {
    size_t lines = LINE / width, each = (count + size_ * lines - 1) / (size_ * lines) * lines;
    *begin = rank_ * each < count ? rank_ * each : count;
    *end = *begin + each < count ? *begin + each : count;
}

static void call(int operation, int dtype, size_t count, int root, int in_place) {
    size_t width = dtype == FP32 ? 4 : 2, bytes = count * width, begin, end;
    char **from = in_place ? recvs : sends, *mine = recvs[rank_], *parts[MOST_RANKS];
    int here = rank_ == root;

    if (operation == ALL_REDUCE && bytes <= SLOT) { /* one meeting: the slots of two calls in turn */
        int turn = step_ & 1;
        for (int other = 0; other < size_; other++) parts[other] = heads[other]->slot[turn];
        memcpy(parts[rank_], from[rank_], bytes);
        meet();
        sum(dtype, parts, &mine, 1, 0, count);
        return;
    }
    if (operation == BARRIER) { meet(); return; }
    meet(); /* all inputs are there, and nobody reads an output of before */
    switch (operation) {
    case ALL_REDUCE:
        share(count, width, &begin, &end);
        sum(dtype, from, recvs, size_, begin, end);
        break;
    case REDUCE:
        share(count, width, &begin, &end);
        sum(dtype, from, recvs + root, 1, begin, end);
        break;
    case REDUCE_SCATTER:
        for (int other = 0; other < size_; other++) parts[other] = sends[other] + rank_ * bytes;
        sum(dtype, parts, &mine, 1, 0, count);
        break;
    case ALL_GATHER:
        for (int other = 0; other < size_; other++)
            if (!in_place || other != rank_)
                memcpy(mine + other * bytes, in_place ? recvs[other] + other * bytes : sends[other], bytes);
        break;
    case BROADCAST:
        if (!here) memcpy(mine, from[root], bytes);
        else if (!in_place) memcpy(mine, sends[root], bytes);
        break;
    case GATHER: /* every rank carries its own part to the root */
        if (!(here && in_place)) memcpy(recvs[root] + rank_ * bytes, here || !in_place ? sends[rank_] : recvs[rank_] + rank_ * bytes, bytes);
        break;
    case SCATTER:
        memcpy(mine, sends[root] + rank_ * bytes, bytes);
        break;
    case ALL_TO_ALL:
        for (int other = 0; other < size_; other++) memcpy(mine + other * bytes, sends[other] + rank_ * bytes, bytes);
        break;
    case SENDRECV:
        memcpy(mine, sends[(rank_ + size_ - 1) % size_], bytes);
        break;
    }
    meet(); /* nobody reads this rank's input or writes its output any more */
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

const char *run_calls(int operation, int dtype, size_t count, int root, int in_place, int calls, double *starts, double *seconds) {
    for (int index = 0; index < calls; index++) {
        meet();
        starts[index] = now();
        call(operation, dtype, count, root, in_place);
        seconds[index] = now() - starts[index];
    }
    return 0;
}
