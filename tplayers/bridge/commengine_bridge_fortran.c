/* What the Fortran module calls: the functions of the header, with Fortran's handles of communicators. */
#include "commengine_bridge.h"

typedef struct { int axes, channels, bytes; long long shape[4], start[4], stop[4]; } fortran_field;

static bridge_field field_of(const fortran_field *f) {
  if (f->bytes != 4 && f->bytes != 8) {
    bridge none = {MPI_COMM_NULL, MPI_COMM_NULL, 0, 0, 0, 0, {NULL, NULL}, 0};
    MPI_Comm_rank(MPI_COMM_WORLD, &none.rank);
    bridge_fail(&none, "bridge_block: bytes must be 4 or 8");
  }
  bridge_field found = {f->axes, f->channels, {0}, {0}, {0}, f->bytes == 8 ? MPI_DOUBLE : MPI_FLOAT};
  memcpy(found.shape, f->shape, sizeof f->shape);
  memcpy(found.start, f->start, sizeof f->start);
  memcpy(found.stop, f->stop, sizeof f->stop);
  return found;
}

void *bridge_open_f(MPI_Fint mine, MPI_Fint other, const fortran_field *gives, const fortran_field *takes) {
  bridge *b = malloc(sizeof *b);
  *b = bridge_open(MPI_Comm_f2c(mine), MPI_Comm_f2c(other), field_of(gives), field_of(takes));
  return b;
}
int bridge_next_f(void *b, long long *number, int *keep) { return bridge_next(b, number, keep); }
void bridge_take_f(void *b, void *block) { bridge_take(b, block); }
void bridge_answer_f(void *b, void *block) { bridge_answer(b, block); }
long long bridge_ask_f(void *b, int what, long long number, int keep, void *give, void *take) {
  return bridge_ask(b, what, number, keep, give, take);
}
void bridge_forget_f(void *b, long long number) { bridge_forget(b, number); }
void bridge_close_f(void *b, int ends) {
  bridge_close(b, ends);
  free(b);
}
