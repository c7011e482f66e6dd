/* Fields and gradients between two programs of one MPI job: the side of C and C++. docs/bridge.md has the protocol.
 * A field is channels x points, row-major in memory. Of its points a rank has those from start to before stop. */
#pragma once
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { BRIDGE_VERSION = 1, BRIDGE_WORDS = 30, BRIDGE_ASK = 1, BRIDGE_ANSWER = 2, BRIDGE_DATA = 3 };
enum { BRIDGE_END = 0, BRIDGE_CALL = 1, BRIDGE_GRADIENT = 2, BRIDGE_FORGET = 3 }; /* what a program asks of the other */
typedef struct { int axes, channels; long long shape[4], start[4], stop[4]; MPI_Datatype type; } bridge_field;
typedef struct { MPI_Comm mine, other; int rank, peers, asked, due; MPI_Datatype *part[2]; long long number; } bridge;
static inline void bridge_fail(const bridge *b, const char *why) { /* ends both; launchers lose a line just before it */
  fprintf(stderr, "bridge: rank %d of its program: %s\n", b->rank, why), fflush(stderr);
  for (double end = MPI_Wtime() + 0.5; MPI_Wtime() < end;) continue;
  MPI_Abort(MPI_COMM_WORLD, 1), exit(1);
}
static inline void bridge_describe(const bridge_field *f, long long *words) {
  int bytes; MPI_Type_size(f->type, &bytes), words[0] = f->axes, words[1] = f->channels, words[2] = bytes;
  for (int a = 0; a < 4; a++) words[3 + a] = f->shape[a], words[7 + a] = f->start[a], words[11 + a] = f->stop[a];
}
/* Collective over both programs. mine: this program's ranks. other: an intercommunicator to the other program.
 * gives, takes: the field that this program gives when it calls or answers, and the one that it takes. */
static inline bridge bridge_open(MPI_Comm mine, MPI_Comm other, bridge_field gives, bridge_field takes) {
  bridge b = {mine, MPI_COMM_NULL, 0, 0, -1, 0, {NULL, NULL}, 0};
  int here = BRIDGE_VERSION, there = here;
  MPI_Comm_rank(mine, &b.rank), MPI_Comm_remote_size(other, &b.peers), MPI_Barrier(mine);
  if (b.rank == 0) MPI_Sendrecv(&here, 1, MPI_INT, 0, 1, &there, 1, MPI_INT, 0, 1, other, MPI_STATUS_IGNORE);
  if (there != here) bridge_fail(&b, "the programs' bridges have different versions");
  long long words[BRIDGE_WORDS], *all = (long long *)malloc(b.peers * sizeof words);
  MPI_Comm_dup(other, &b.other), bridge_describe(&gives, words), bridge_describe(&takes, words + 15);
  MPI_Allgather(words, BRIDGE_WORDS, MPI_LONG_LONG, all, BRIDGE_WORDS, MPI_LONG_LONG, b.other);
  for (int which = 0; which < 2; which++) {
    const bridge_field *f = which ? &takes : &gives;
    long long points = 1, covered = 0, common = 1;
    for (int a = 0; a < f->axes; a++) points *= f->stop[a] - f->start[a];
    b.part[which] = (MPI_Datatype *)malloc(b.peers * sizeof(MPI_Datatype));
    for (int peer = 0; peer < b.peers; peer++, common = 1) {
      const long long *own = words + 15 * which, *their = all + peer * BRIDGE_WORDS + 15 - 15 * which;
      if (memcmp(own, their, (3 + f->axes) * sizeof *own)) bridge_fail(&b, "the programs' fields are not the same");
      int sizes[5] = {f->channels}, lengths[5] = {f->channels}, at[5] = {0};
      for (int a = 0; a < f->axes; a++) {
        long long low = f->start[a] > their[7 + a] ? f->start[a] : their[7 + a];
        long long high = f->stop[a] < their[11 + a] ? f->stop[a] : their[11 + a];
        sizes[1 + a] = (int)(f->stop[a] - f->start[a]), at[1 + a] = (int)(low - f->start[a]);
        lengths[1 + a] = high > low ? (int)(high - low) : 0, common *= lengths[1 + a];
      }
      if (covered += common, b.part[which][peer] = MPI_DATATYPE_NULL, !common) continue;
      MPI_Type_create_subarray(1 + f->axes, sizes, lengths, at, MPI_ORDER_C, f->type, &b.part[which][peer]);
      MPI_Type_commit(&b.part[which][peer]);
    }
    if (covered != points) bridge_fail(&b, "the other program's blocks do not have each point of this rank's once");
  }
  return free(all), b;
}
static inline void bridge_move(bridge *b, int which, int sends, void *block) { /* which: 0 the given field, 1 taken */
  if (b->due-- != 2 - sends) bridge_fail(b, "bridge_take comes once after each call or gradient of bridge_next");
  MPI_Request *started = (MPI_Request *)malloc(b->peers * sizeof(MPI_Request));
  for (int peer = 0; peer < b->peers; peer++) {
    MPI_Datatype part = b->part[which][peer];
    if (part == MPI_DATATYPE_NULL) started[peer] = MPI_REQUEST_NULL;
    else if (sends) MPI_Isend(block, 1, part, peer, BRIDGE_DATA, b->other, &started[peer]);
    else MPI_Irecv(block, 1, part, peer, BRIDGE_DATA, b->other, &started[peer]);
  }
  MPI_Waitall(b->peers, started, MPI_STATUSES_IGNORE), free(started);
}
static inline void bridge_tell(bridge *b, int tag, long long what, long long number, long long keep) {
  if (b->due != (tag == BRIDGE_ANSWER)) bridge_fail(b, "a bridge_answer without bridge_take, or a call before it");
  long long words[3] = {what, number, keep}; if (b->rank == 0) MPI_Send(words, 3, MPI_LONG_LONG, 0, tag, b->other);
}
static inline int bridge_hear(bridge *b, int tag, long long *number, int *keep) {
  long long words[3];
  if (b->due || b->asked == BRIDGE_END) bridge_fail(b, "bridge_next comes after bridge_answer, until BRIDGE_END");
  if (b->rank == 0) MPI_Recv(words, 3, MPI_LONG_LONG, 0, tag, b->other, MPI_STATUS_IGNORE);
  MPI_Bcast(words, 3, MPI_LONG_LONG, 0, b->mine), b->asked = (int)words[0];
  b->due = b->asked == BRIDGE_CALL || b->asked == BRIDGE_GRADIENT ? 2 : 0; /* 2: to take, 1: to answer */
  return *number = words[1], *keep = (int)words[2], b->asked;
}
/* To answer: bridge_next says what the other program asks. After BRIDGE_CALL take its field and answer with yours; with
 * keep, it may ask for gradients of this number. After BRIDGE_GRADIENT take the gradient of the field that you gave,
 * and answer with that of the field that you took. After BRIDGE_FORGET it will ask for none of this number. */
static inline int bridge_next(bridge *b, long long *number, int *k) { return bridge_hear(b, BRIDGE_ASK, number, k); }
static inline void bridge_take(bridge *b, void *block) { bridge_move(b, b->asked == BRIDGE_CALL, 0, block); }
static inline void bridge_answer(bridge *b, void *block) {
  bridge_tell(b, BRIDGE_ANSWER, b->asked, 0, 0), bridge_move(b, b->asked == BRIDGE_GRADIENT, 1, block);
}
/* To ask: what is BRIDGE_CALL or BRIDGE_GRADIENT. Returns the number of the last call, which its gradients name. */
static inline long long bridge_ask(bridge *b, int what, long long number, int keep, void *give, void *take) {
  bridge_tell(b, BRIDGE_ASK, what, what == BRIDGE_CALL ? (number = ++b->number) : number, keep);
  b->due = 1, bridge_move(b, what == BRIDGE_GRADIENT, 1, give);
  if (bridge_hear(b, BRIDGE_ANSWER, &number, &keep) != what) bridge_fail(b, "the answer is not to what was asked");
  return bridge_move(b, what == BRIDGE_CALL, 0, take), b->due = 0, b->number;
}
static inline void bridge_forget(bridge *b, long long number) { bridge_tell(b, BRIDGE_ASK, BRIDGE_FORGET, number, 0); }
static inline void bridge_close(bridge *b, int ends) { /* collective over both; ends: this program asked the other */
  if (ends) bridge_tell(b, BRIDGE_ASK, BRIDGE_END, 0, 0);
  else if (b->asked != BRIDGE_END) bridge_fail(b, "it closes the bridge, and the other program has not ended");
  for (int n = 0, p = b->peers; n < 2 * p; n++)
    if (b->part[n / p][n % p] != MPI_DATATYPE_NULL) MPI_Type_free(&b->part[n / p][n % p]);
  free(b->part[0]), free(b->part[1]), MPI_Comm_free(&b->other);
}
