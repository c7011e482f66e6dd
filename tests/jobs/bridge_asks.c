/* Asks a Python program for x -> sin(2 x) and its gradients: those of the first call after the second, twice.
 * With an argument it answers one call, by the calls that the letters name: n(ext), t(ake), a(nswer), (as)k. */
#include <math.h>

#include "commengine_bridge.h"

enum { POINTS = 11 };

int main(int argc, char **argv) {
  MPI_Comm mine, other;
  int rank, size, ranks, *color, set, colors[64], leader = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &color, &set);
  MPI_Allgather(color, 1, MPI_INT, colors, 1, MPI_INT, MPI_COMM_WORLD);
  MPI_Comm_split(MPI_COMM_WORLD, *color, 0, &mine);
  while (colors[leader] == *color) leader++;
  MPI_Intercomm_create(mine, 0, MPI_COMM_WORLD, leader, 20000, &other);
  MPI_Comm_rank(mine, &rank);
  MPI_Comm_size(mine, &ranks);
  int first = rank * POINTS / ranks, last = (rank + 1) * POINTS / ranks;
  bridge_field field = {1, 1, {POINTS, 0, 0, 0}, {first, 0, 0, 0}, {last, 0, 0, 0}, MPI_FLOAT};
  bridge b = bridge_open(mine, other, field, field);
  for (char *letter = argc > 1 ? argv[1] : ""; *letter; letter++) {
    float block[POINTS] = {0};
    long long call;
    int keep;
    if (*letter == 'n') bridge_next(&b, &call, &keep);
    if (*letter == 't') bridge_take(&b, block);
    if (*letter == 'k') bridge_ask(&b, BRIDGE_CALL, 0, 0, block, block);
    if (*letter == 'a') bridge_answer(&b, block);
  }
  if (argc > 1) bridge_close(&b, 0);
  float x[2][POINTS], y[2][POINTS], up[POINTS], down[POINTS];
  double worst = 0, all;
  long long number[2];
  for (int n = 0; n < 2; n++) {
    for (int i = first; i < last; i++) x[n][i - first] = 0.3f * i - n;
    number[n] = bridge_ask(&b, BRIDGE_CALL, 0, 1, x[n], y[n]);
    for (int i = 0; i < last - first; i++) worst = fmax(worst, fabs(y[n][i] - sin(2 * x[n][i])));
  }
  for (int times = 0; times < 2; times++) {
    for (int i = 0; i < last - first; i++) up[i] = 1 + i + first;
    bridge_ask(&b, BRIDGE_GRADIENT, number[0], 1, up, down);
    for (int i = 0; i < last - first; i++) worst = fmax(worst, fabs(down[i] - 2 * cos(2 * x[0][i]) * up[i]));
  }
  bridge_forget(&b, number[0]);
  bridge_ask(&b, BRIDGE_CALL, 0, 0, x[1], y[0]);
  for (int i = 0; i < last - first; i++) worst = fmax(worst, fabs(y[0][i] - y[1][i]));
  MPI_Reduce(&worst, &all, 1, MPI_DOUBLE, MPI_MAX, 0, mine);
  if (rank == 0) printf("ERROR %.3g\n", all);
  bridge_close(&b, 1);
  MPI_Comm_free(&other);
  MPI_Comm_free(&mine);
  MPI_Finalize();
  return 0;
}
