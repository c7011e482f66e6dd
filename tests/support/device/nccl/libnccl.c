/* libnccl.so.2 on host memory: the real CuPy binding calls it, and nothing else of CUDA is needed.

   A call checks its arguments and enqueues, as NCCL's does. What is launched at once becomes one launch with a number;
   `launched` tells the tests its stream and number, and they run it by `run` when somebody waits for it. So a result
   that was used without a wait is wrong every time. Ranks are processes of one host. They exchange files in a folder
   that the unique id names:

     member.R          exists while rank R is in the communicator; R holds a lock on it, which its death releases
     connected[..].R   R is ready to communicate: with all, or to send or receive with one peer. The host waits for it
     call-N.R          R's part of the communicator's collective N
     message-N-to-P.R  message N from R to P, which P removes when it has taken it
     end.R             R has called ncclCommDestroy

   Files of calls stay until the communicator ends. A sum is rounded after each step, from the last rank to the first,
   and the calls of a group are completed from the last one to the first, so that nobody relies on an order.
   A launch that misses a rank ends after `deadline` seconds, and `said` tells why. After the death of a rank the
   communicator has an asynchronous error, and the launch goes on waiting until it is aborted. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, TYPES };
enum { SUM, PROD, MAX, MIN, AVG, OPS };
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV };
enum { OPEN, DESTROYED, ABORTED };

#define UNIQUE_ID_BYTES 128
#define ORDERED 22600 /* the first NCCL that knows NCCL_LAUNCH_ORDER_IMPLICIT */
static const size_t SIZES[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

typedef struct { char internal[UNIQUE_ID_BYTES]; } UniqueId;

typedef struct Comm {
    int rank, size, device, number, end, error, outstanding;
    int lock_file;
    char folder[512];
    char *connected;              /* [0]: with all; [1 + peer]: sends; [1 + size + peer]: receives */
    long calls, *sent, *received; /* how many, in the order of their launches */
} Comm;

typedef struct Call { /* one call, or its contents as other ranks read them */
    int verb, type, op, root;
    size_t count;
    const char *source;
    char *target;
    Comm *comm;
    void *stream;
    long sequence;
    struct Call *next;
} Call;

typedef struct Launch { long number; Call *calls; struct Launch *next; } Launch;

/* What the tests set and read ---------------------------------------------------------------------------------- */

int version = 23203;
double deadline = 8;  /* seconds after which ranks that wait for each other are taken to be in a deadlock */
int ordered = -1;     /* whether launches keep the host's order; -1: NCCL has not started */
char said[1024];      /* the last error in words; also what ncclGetLastError returns */
char broken[1024];    /* the first call that no caller of NCCL may make, although NCCL would not notice */
char calls[1 << 16];  /* the names of all calls so far, each with a space behind it */
char failing[64];     /* the call that fails next */
int failing_with;     /* and its status */
int made;             /* communicators of this process so far */
void (*launched)(void *stream, long number);
int (*current_device)(void);

static Comm *comms[1 << 14];
static Launch *launches;
static long last_launch;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int depth, group_error;
static __thread Call *group;

int group_depth(void) { return depth; }
int outstanding(int number) { return comms[number]->outstanding; }
int end_of(int number) { return comms[number]->end; }
int device_of(int number) { return comms[number]->device; }
void lose(int number) { close(comms[number]->lock_file), comms[number]->lock_file = -1; } /* as if this rank had died */

static int fault(int status, const char *format, ...) {
    va_list words;
    va_start(words, format);
    vsnprintf(said, sizeof said, format, words);
    va_end(words);
    return status;
}

/* The status that a test has planned for this call, once. */
static int entered(const char *name) {
    int status = SUCCESS;
    pthread_mutex_lock(&lock);
    if (strlen(calls) + strlen(name) + 2 < sizeof calls) strcat(strcat(calls, name), " ");
    if (!strcmp(failing, name)) {
        failing[0] = 0;
        status = fault(failing_with, "a test lets %s fail", name);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static void start(void) { /* NCCL reads its environment once */
    const char *order = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    if (ordered < 0) ordered = version >= ORDERED && order && !strcmp(order, "1");
}

static int in_progress(int status) { /* of a communicator that does not block */
    const char *blocking = getenv("NCCL_COMM_BLOCKING");
    return status == SUCCESS && blocking && !strcmp(blocking, "0") ? IN_PROGRESS : status;
}

/* Files -------------------------------------------------------------------------------------------------------- */

typedef struct { char text[640]; } Path;

static Path path(const Comm *comm, int rank, const char *format, ...) {
    Path made_path;
    char name[80];
    va_list words;
    va_start(words, format);
    vsnprintf(name, sizeof name, format, words);
    va_end(words);
    snprintf(made_path.text, sizeof made_path.text, "%s/%s.%d", comm->folder, name, rank);
    return made_path;
}

static int put(Path target, const void *head, size_t head_bytes, const void *data, size_t bytes) {
    Path part = target;
    strcat(part.text, ".part");
    FILE *file = fopen(part.text, "wbe");
    if (!file) return fault(SYSTEM_ERROR, "%s: %s", part.text, strerror(errno));
    int whole = fwrite(head, 1, head_bytes, file) == head_bytes && (!bytes || fwrite(data, 1, bytes, file) == bytes);
    whole &= !fclose(file);
    if (!whole || rename(part.text, target.text)) return fault(SYSTEM_ERROR, "%s: %s", part.text, strerror(errno));
    return SUCCESS;
}

static int get(Path source, void *head, size_t head_bytes, void *data, size_t bytes) {
    FILE *file = fopen(source.text, "rbe");
    if (!file) return fault(SYSTEM_ERROR, "%s: %s", source.text, strerror(errno));
    int whole = fread(head, 1, head_bytes, file) == head_bytes && (!bytes || fread(data, 1, bytes, file) == bytes);
    fclose(file);
    return whole ? SUCCESS : fault(SYSTEM_ERROR, "%s is too short", source.text);
}

static int is_there(Path file) { return !access(file.text, F_OK); }

static int has_left(const Comm *comm, int peer) { /* or died */
    int file = open(path(comm, peer, "member").text, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 1;
    int free = !flock(file, LOCK_SH | LOCK_NB);
    close(file);
    return free;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* Wait until the file is there (or, if `there` is 0, is not). */
static int met(Comm *comm, int peer, Path file, int there, const char *what) {
    double until = now() + deadline;
    while (is_there(file) != there) {
        if (comm->end == ABORTED) return fault(INTERNAL_ERROR, "aborted");
        if (peer != comm->rank && has_left(comm, peer) && is_there(file) != there) {
            comm->error = REMOTE_ERROR;
            snprintf(said, sizeof said, "rank %d has left", peer);
        }
        if (now() > until) return fault(INTERNAL_ERROR, "deadlock: %s (rank %d waits for rank %d)", what, comm->rank, peer);
        usleep(50);
    }
    return SUCCESS;
}

static void remove_own_files(Comm *comm) {
    char suffix[16];
    DIR *folder = opendir(comm->folder);
    snprintf(suffix, sizeof suffix, ".%d", comm->rank);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        size_t length = strlen(entry->d_name), tail = strlen(suffix);
        if (length > tail && !strcmp(entry->d_name + length - tail, suffix) && strncmp(entry->d_name, "member.", 7))
            unlinkat(dirfd(folder), entry->d_name, 0);
    }
    if (folder) closedir(folder);
    unlink(path(comm, comm->rank, "member").text); /* last, because the others read from it that this rank has left */
    rmdir(comm->folder);                           /* by the last rank: before, it is not empty */
}

__attribute__((destructor)) static void leave(void) {
    for (int number = 0; number < made; number++)
        if (comms[number]->end != DESTROYED) remove_own_files(comms[number]);
}

/* Communicators ------------------------------------------------------------------------------------------------ */

static int join(Comm **joined, const char *folder, int size, int rank) {
    Comm *comm = calloc(1, sizeof *comm);
    comm->size = size, comm->rank = rank, comm->device = current_device ? current_device() : 0;
    comm->connected = calloc(1 + 2 * size, 1);
    comm->sent = calloc(size, sizeof(long)), comm->received = calloc(size, sizeof(long));
    snprintf(comm->folder, sizeof comm->folder, "%s", folder);
    mkdir(folder, 0700);
    Path mine = path(comm, rank, "member"), part = mine;
    strcat(part.text, ".part");
    comm->lock_file = open(part.text, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (comm->lock_file < 0 || flock(comm->lock_file, LOCK_EX) || rename(part.text, mine.text))
        return fault(SYSTEM_ERROR, "%s: %s", part.text, strerror(errno));
    double until = now() + 20;
    for (int peer = 0; peer < size; peer++)
        while (!is_there(path(comm, peer, "member"))) {
            if (now() > until) return fault(SYSTEM_ERROR, "rank %d did not come to the start", peer);
            usleep(50);
        }
    pthread_mutex_lock(&lock);
    comm->number = made;
    comms[made++] = comm;
    pthread_mutex_unlock(&lock);
    *joined = comm;
    return SUCCESS;
}

int ncclGetVersion(int *found) { return *found = version, SUCCESS; }

int ncclGetUniqueId(UniqueId *id) {
    int status = entered("GetUniqueId");
    start();
    if (!status && getrandom(id->internal, UNIQUE_ID_BYTES, 0) != UNIQUE_ID_BYTES) status = SYSTEM_ERROR;
    return status;
}

int ncclCommInitRank(Comm **comm, int size, UniqueId id, int rank) {
    int status = entered("CommInitRank");
    char folder[512];
    const char *root = getenv("TMPDIR");
    int length = snprintf(folder, sizeof folder - 40, "%s/nccl-of-the-tests-", root && *root ? root : "/tmp");
    for (int index = 0; index < 16; index++) length += sprintf(folder + length, "%02x", (uint8_t)id.internal[index]);
    start();
    *comm = NULL;
    if (!status && (size < 1 || rank < 0 || rank >= size)) status = fault(INVALID_ARGUMENT, "rank %d of %d", rank, size);
    return in_progress(status ? status : join(comm, folder, size, rank));
}

int ncclCommInitRankConfig(Comm **comm, int size, UniqueId id, int rank, const void *config) {
    (void)config;
    return ncclCommInitRank(comm, size, id, rank);
}

int ncclCommInitAll(Comm **comm, int count, const int *devices) {
    (void)comm, (void)count, (void)devices;
    return fault(INVALID_USAGE, "ncclCommInitAll: a process has one device");
}

int ncclCommSplit(Comm *comm, int color, int key, Comm **part, const void *config) {
    (void)comm, (void)color, (void)key, (void)part, (void)config;
    return fault(INVALID_USAGE, "ncclCommSplit: the engine connects the ranks of a part as those of a group");
}

int ncclCommDestroy(Comm *comm) {
    int status = entered("CommDestroy");
    if (!comm) return INVALID_ARGUMENT;
    if (comm->outstanding) snprintf(broken, sizeof broken, "destroyed while calls are outstanding");
    if (!status) status = put(path(comm, comm->rank, "end"), "", 0, NULL, 0);
    for (int peer = 0; peer < comm->size && !status; peer++) {
        double until = now() + deadline;
        while (!is_there(path(comm, peer, "end")) && !has_left(comm, peer) && !status) {
            if (now() > until) status = fault(INTERNAL_ERROR, "deadlock: rank %d does not destroy", peer);
            usleep(50);
        }
    }
    comm->end = DESTROYED;
    remove_own_files(comm);
    close(comm->lock_file);
    return status;
}

int ncclCommAbort(Comm *comm) { /* its files stay: other ranks may still read what this one has done */
    entered("CommAbort");
    if (!comm) return INVALID_ARGUMENT;
    comm->end = ABORTED;
    return SUCCESS;
}

int ncclCommGetAsyncError(Comm *comm, int *status) {
    *status = entered("CommGetAsyncError");
    if (!comm) return fault(INVALID_ARGUMENT, "no communicator");
    if (!*status) *status = comm->error;
    return SUCCESS;
}

int ncclCommCount(const Comm *comm, int *found) { return comm ? (*found = comm->size, SUCCESS) : INVALID_ARGUMENT; }
int ncclCommUserRank(const Comm *comm, int *found) { return comm ? (*found = comm->rank, SUCCESS) : INVALID_ARGUMENT; }
int ncclCommCuDevice(const Comm *comm, int *found) { return comm ? (*found = comm->device, SUCCESS) : INVALID_ARGUMENT; }
const char *ncclGetLastError(Comm *comm) { return (void)comm, said; }

const char *ncclGetErrorString(int status) {
    static const char *words[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage", "remote process exited or there was a network error", "in progress"};
    return status >= 0 && status <= IN_PROGRESS ? words[status] : "unknown result code";
}

/* Launching ---------------------------------------------------------------------------------------------------- */

/* Ranks connect when they first communicate. The caller's thread waits for the others. */
static int connect_all(Call *first) {
    int status = SUCCESS;
    for (int wait = 0; wait < 2; wait++)
        for (Call *call = first; call && !status; call = call->next) {
            Comm *comm = call->comm;
            int from = call->verb < SEND ? 0 : call->root, to = call->verb < SEND ? comm->size : from + 1;
            const char *way = call->verb == SEND ? "-to" : "-from", *back = call->verb == SEND ? "-from" : "-to";
            char *done = comm->connected + (call->verb < SEND ? 0 : 1 + (call->verb == RECV) * comm->size + call->root);
            if (*done == 2) continue;
            if (!wait && call->verb < SEND) status = put(path(comm, comm->rank, "connected"), "", 0, NULL, 0);
            if (!wait && call->verb >= SEND) status = put(path(comm, comm->rank, "connected%s-%d", way, from), "", 0, NULL, 0);
            for (int peer = from; wait && peer < to && !status; peer++) {
                Path theirs = call->verb < SEND ? path(comm, peer, "connected") : path(comm, peer, "connected%s-%d", back, comm->rank);
                status = met(comm, peer, theirs, 1, "not every rank connects");
            }
            if (wait) *done = 2;
        }
    return status;
}

static void forget(Call *call) {
    for (Call *next; call; call = next) {
        next = call->next;
        __sync_fetch_and_sub(&call->comm->outstanding, 1);
        free(call);
    }
}

/* Launch the calls of a group, those of each stream at once. */
static int launch(Call *first) {
    int status = connect_all(first);
    if (status) return forget(first), status;
    while (first) {
        Call *mine = NULL, **mine_end = &mine, *rest = NULL, **rest_end = &rest;
        void *stream = first->stream;
        for (Call *call = first; call; call = call->next) {
            Call ***end = call->stream == stream ? &mine_end : &rest_end;
            **end = call, *end = &call->next;
        }
        *mine_end = *rest_end = NULL;
        Launch *one = calloc(1, sizeof *one);
        pthread_mutex_lock(&lock);
        one->number = ++last_launch, one->calls = mine, one->next = launches;
        launches = one;
        pthread_mutex_unlock(&lock);
        launched(stream, one->number);
        first = rest;
    }
    return SUCCESS;
}

int ncclGroupStart(void) {
    int status = entered("GroupStart");
    if (!status) depth++;
    return status;
}

int ncclGroupEnd(void) {
    int planned = entered("GroupEnd");
    if (!depth) return fault(INVALID_USAGE, "a group ends that did not start");
    if (--depth) return planned;
    Call *mine = group;
    int status = group_error ? group_error : planned;
    group = NULL, group_error = SUCCESS;
    if (status) return forget(mine), status; /* as NCCL: nothing of a group with an error is launched */
    return in_progress(launch(mine));
}

static int enqueue(const char *name, Call call) {
    Comm *comm = call.comm;
    int status = entered(name), reduces = call.verb <= REDUCE_SCATTER;
    if (!status && !comm) status = fault(INVALID_ARGUMENT, "%s: no communicator", name);
    if (!status && (call.type < 0 || call.type >= TYPES)) status = fault(INVALID_ARGUMENT, "%s: type %d", name, call.type);
    if (!status && reduces && (call.op < 0 || call.op >= OPS)) status = fault(INVALID_ARGUMENT, "%s: op %d", name, call.op);
    if (!status && call.op == AVG && call.type < FLOAT16) status = fault(INVALID_ARGUMENT, "%s: avg of integers", name);
    if (!status && (call.root < 0 || call.root >= comm->size)) status = fault(INVALID_ARGUMENT, "%s: rank %d", name, call.root);
    if (!status && (!call.count || (!call.source && !call.target))) status = fault(INVALID_ARGUMENT, "%s: no data", name);
    /* NCCL sets the device itself where it has others to speak to */
    if (!status && comm->size == 1 && current_device() != comm->device) status = fault(CUDA_ERROR, "invalid resource handle");
    if (status) {
        if (depth && !group_error) group_error = status;
        return status;
    }
    Call *kept = malloc(sizeof *kept), **end = &group;
    *kept = call;
    kept->next = NULL;
    __sync_fetch_and_add(&comm->outstanding, 1);
    if (!depth) return in_progress(launch(kept));
    while (*end) end = &(*end)->next;
    *end = kept;
    return SUCCESS;
}

int ncclAllReduce(const void *source, void *target, size_t count, int type, int op, Comm *comm, void *stream) {
    return enqueue("AllReduce", (Call){ALL_REDUCE, type, op, 0, count, source, target, comm, stream, 0, NULL});
}
int ncclReduce(const void *source, void *target, size_t count, int type, int op, int root, Comm *comm, void *stream) {
    return enqueue("Reduce", (Call){REDUCE, type, op, root, count, source, target, comm, stream, 0, NULL});
}
int ncclReduceScatter(const void *source, void *target, size_t count, int type, int op, Comm *comm, void *stream) {
    return enqueue("ReduceScatter", (Call){REDUCE_SCATTER, type, op, 0, count, source, target, comm, stream, 0, NULL});
}
int ncclAllGather(const void *source, void *target, size_t count, int type, Comm *comm, void *stream) {
    return enqueue("AllGather", (Call){ALL_GATHER, type, 0, 0, count, source, target, comm, stream, 0, NULL});
}
int ncclBroadcast(const void *source, void *target, size_t count, int type, int root, Comm *comm, void *stream) {
    return enqueue("Broadcast", (Call){BROADCAST, type, 0, root, count, source, target, comm, stream, 0, NULL});
}
int ncclBcast(void *data, size_t count, int type, int root, Comm *comm, void *stream) {
    return enqueue("Broadcast", (Call){BROADCAST, type, 0, root, count, data, data, comm, stream, 0, NULL});
}
int ncclSend(const void *source, size_t count, int type, int peer, Comm *comm, void *stream) {
    return enqueue("Send", (Call){SEND, type, 0, peer, count, source, NULL, comm, stream, 0, NULL});
}
int ncclRecv(void *target, size_t count, int type, int peer, Comm *comm, void *stream) {
    return enqueue("Recv", (Call){RECV, type, 0, peer, count, NULL, target, comm, stream, 0, NULL});
}

/* Arithmetic. A double holds the exact sum or product of two floats or halves closely enough that rounding it once more
   gives the rounded result. ----------------------------------------------------------------------------------------- */

static double get_number(int type, const char *data, size_t index) {
    const uint16_t *halves = (const uint16_t *)data;
    if (type == FLOAT64) return ((const double *)data)[index];
    if (type == FLOAT32) return ((const float *)data)[index];
    if (type == FLOAT16) return ((const _Float16 *)data)[index];
    uint32_t bits = (uint32_t)halves[index] << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static void put_number(int type, char *data, size_t index, double number) {
    if (type == FLOAT64) ((double *)data)[index] = number;
    else if (type == FLOAT32) ((float *)data)[index] = number;
    else if (type == FLOAT16) ((_Float16 *)data)[index] = number;
    else { /* to the nearest bfloat16, ties to even. The first rounding, to a float, is exact for what is added here */
        float rounded = number;
        uint32_t bits;
        memcpy(&bits, &rounded, 4);
        int special = (bits & 0x7f800000u) == 0x7f800000u;
        ((uint16_t *)data)[index] = special ? bits >> 16 | !!(bits & 0xffff) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}

static int64_t get_integer(int type, const char *data, size_t index) {
    switch (type) {
    case INT8: return ((const int8_t *)data)[index];
    case UINT8: return ((const uint8_t *)data)[index];
    case INT32: return ((const int32_t *)data)[index];
    case UINT32: return ((const uint32_t *)data)[index];
    default: return ((const int64_t *)data)[index];
    }
}

static void add(const Call *call, char *total, const char *part, size_t count) { /* with -fwrapv */
    for (size_t index = 0; index < count; index++)
        if (call->type >= FLOAT16) {
            double a = get_number(call->type, total, index), b = get_number(call->type, part, index);
            put_number(call->type, total, index, call->op == PROD ? a * b : call->op == MAX ? (a > b ? a : b)
                : call->op == MIN ? (a < b ? a : b) : a + b);
        } else {
            int64_t a = get_integer(call->type, total, index), b = get_integer(call->type, part, index);
            int less = call->type == UINT64 ? (uint64_t)a < (uint64_t)b : a < b;
            int64_t both = call->op == PROD ? a * b : call->op == MAX ? (less ? b : a) : call->op == MIN ? (less ? a : b) : a + b;
            memcpy(total + index * SIZES[call->type], &both, SIZES[call->type]); /* little-endian: the low bytes */
        }
}

static void scale(const Call *call, char *data, size_t count) { /* by the rounded 1/n */
    char one_of_n[8];
    put_number(call->type, one_of_n, 0, 1.0 / call->comm->size);
    for (size_t index = 0; index < count; index++)
        put_number(call->type, data, index, get_number(call->type, data, index) * get_number(call->type, one_of_n, 0));
}

/* Running ------------------------------------------------------------------------------------------------------ */

typedef struct { int verb, type, op, root; uint64_t count; } Head; /* in which the ranks of a collective must agree */

static size_t part_bytes(const Call *call, int rank) { /* of what a rank gives to a collective or sends */
    size_t bytes = call->count * SIZES[call->type];
    if (call->verb == REDUCE_SCATTER) return bytes * call->comm->size;
    return call->verb == BROADCAST && rank != call->root ? 0 : bytes;
}

static int publish(Call *call) {
    Comm *comm = call->comm;
    Head head = {call->verb, call->type, call->op, call->root, call->count};
    if (call->verb == RECV) return call->sequence = comm->received[call->root]++, SUCCESS;
    Path file;
    if (call->verb == SEND) {
        call->sequence = comm->sent[call->root]++;
        file = path(comm, comm->rank, "message-%ld-to-%d", call->sequence, call->root);
    } else {
        call->sequence = comm->calls++;
        file = path(comm, comm->rank, "call-%ld", call->sequence);
    }
    return put(file, &head, sizeof head, call->source, part_bytes(call, comm->rank));
}

static int receive(Call *call) {
    Comm *comm = call->comm;
    Head head;
    Path file = path(comm, call->root, "message-%ld-to-%d", call->sequence, comm->rank);
    int status = met(comm, call->root, file, 1, "a recv without its send");
    if (!status) status = get(file, &head, sizeof head, NULL, 0);
    if (!status && (head.count != call->count || head.type != call->type))
        status = fault(INVALID_USAGE, "a recv of %zu of type %d, and a send of %zu of type %d", call->count, call->type,
                       (size_t)head.count, head.type);
    if (!status) status = get(file, &head, sizeof head, call->target, part_bytes(call, comm->rank));
    unlink(file.text);
    return status;
}

static int collect(Call *call) {
    Comm *comm = call->comm;
    size_t bytes = call->count * SIZES[call->type], wide = part_bytes(call, call->root), numbers = wide / SIZES[call->type];
    char *total = NULL, *part = malloc(wide);
    int status = SUCCESS;
    for (int peer = comm->size - 1; peer >= 0 && !status; peer--) { /* from the last rank on */
        Head mine = {call->verb, call->type, call->op, call->root, call->count}, theirs;
        Path file = path(comm, peer, "call-%ld", call->sequence);
        if ((status = met(comm, peer, file, 1, "the ranks run the collectives of two communicators in different orders"))) break;
        if ((status = get(file, &theirs, sizeof theirs, NULL, 0))) break;
        if (memcmp(&mine, &theirs, sizeof mine)) {
            status = fault(INVALID_USAGE, "call %ld differs: rank %d's (verb, type, op, root, count) is %d %d %d %d %zu, rank %d's "
                "%d %d %d %d %zu", call->sequence, comm->rank, mine.verb, mine.type, mine.op, mine.root, (size_t)mine.count,
                peer, theirs.verb, theirs.type, theirs.op, theirs.root, (size_t)theirs.count);
            break;
        }
        if (call->verb == BROADCAST && peer != call->root) continue;
        if ((status = get(file, &theirs, sizeof theirs, part, wide))) break;
        if (call->verb == BROADCAST) memcpy(call->target, part, bytes);
        else if (call->verb == ALL_GATHER) memcpy(call->target + peer * bytes, part, bytes);
        else {
            if (call->op == AVG) scale(call, part, numbers);
            if (total) add(call, total, part, numbers);
            else total = part, part = malloc(wide);
        }
    }
    if (!status && call->verb == ALL_REDUCE) memcpy(call->target, total, bytes);
    if (!status && call->verb == REDUCE_SCATTER) memcpy(call->target, total + comm->rank * bytes, bytes);
    if (!status && call->verb == REDUCE && comm->rank == call->root) memcpy(call->target, total, bytes);
    if (!status && call->verb == REDUCE && comm->rank != call->root && call->target) memset(call->target, 0xEE, bytes); /* NCCL may */
    free(total), free(part);
    return status;
}

static Call *reversed(Call *call) {
    Call *found = NULL;
    for (Call *next; call; call = next) next = call->next, call->next = found, found = call;
    return found;
}

/* Run a launch, whose turn has come on its stream. Returns 0, or a status that `said` explains. */
int run(long number) {
    pthread_mutex_lock(&lock);
    Launch **place = &launches, *one;
    while (*place && (*place)->number != number) place = &(*place)->next;
    one = *place;
    if (one) *place = one->next;
    pthread_mutex_unlock(&lock);
    if (!one) return fault(INTERNAL_ERROR, "launch %ld has run already", number);
    int status = SUCCESS;
    /* Everybody gives first, so that the order of a group's calls may differ between the ranks. */
    for (Call *call = one->calls; call && !status; call = call->next)
        if (call->comm->end != ABORTED) status = publish(call);
    one->calls = reversed(one->calls);
    for (Call *call = one->calls; call && !status; call = call->next)
        if (call->comm->end != ABORTED && call->verb != SEND) status = call->verb == RECV ? receive(call) : collect(call);
    for (Call *call = one->calls; call && !status; call = call->next)
        if (call->comm->end != ABORTED && call->verb == SEND)
            status = met(call->comm, call->root, path(call->comm, call->comm->rank, "message-%ld-to-%d", call->sequence, call->root),
                         0, "a send without its recv");
    for (Call *call = one->calls; call; call = call->next)
        if (call->comm->end == ABORTED) status = SUCCESS; /* its user has been told */
    forget(one->calls);
    free(one);
    return status;
}
