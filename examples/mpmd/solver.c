/* An Allen-Cahn equation on a periodic plane, u_t = D (u_xx + u_yy) + u - u^3, each rank with a block of rows.
 *
 *     mpicc -O2 -o solver solver.c -lm
 *     mpiexec -n 2 ./solver [ROWS COLUMNS LAST_FRAME TESTS] : -n 2 python network.py
 *
 * The solver sends every frame to the other program of the job, which trains a network on them. For the last TESTS
 * frames the network sends its forecast of the next frame back, and the solver compares it with its own result. */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS_OF_A_FRAME = 10, TAG_OF_A_PAIR = 20000, FIELD = 1, FORECAST = 2 };
static const double DT = 0.1, DIFFUSION = 1.0;

/* The ranks of this program, and an intercommunicator to the only other one: the C side of launch.split_world. */
static void split_world(MPI_Comm *mine, MPI_Comm *other) {
  int rank, size, *set_by_launcher, set, color = 0, first = 0, leader = -1; /* 0: srun sets no MPI_APPNUM */
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &set_by_launcher, &set);
  if (set) color = *set_by_launcher;
  int *colors = malloc(size * sizeof(int));
  MPI_Allgather(&color, 1, MPI_INT, colors, 1, MPI_INT, MPI_COMM_WORLD);
  for (int r = size - 1; r >= 0; r--) /* the lowest ranks of this program and of the other */
    if (colors[r] == color) first = r; else leader = r;
  for (int r = 0; r < size && leader >= 0; r++)
    if (colors[r] != color && colors[r] != colors[leader]) leader = -1; /* there is a third program */
  if (leader < 0) {
    if (rank == first) fprintf(stderr, "solver: a job has two programs: mpiexec -n 2 ./solver : -n 2 python ...\n");
    for (double end = MPI_Wtime() + 0.5; MPI_Wtime() < end;) continue; /* launchers lose lines that come just before */
    MPI_Abort(MPI_COMM_WORLD, 2), exit(2);
  }
  MPI_Comm_split(MPI_COMM_WORLD, color, 0, mine);
  MPI_Intercomm_create(*mine, 0, MPI_COMM_WORLD, leader, TAG_OF_A_PAIR, other);
  free(colors);
}

static int first_row(int rows, int parts, int part) { /* of blocks as equal as possible, the larger ones first */
  return part * (rows / parts) + (part < rows % parts ? part : rows % parts);
}

/* Send the rows of this rank to the ranks of the network that hold them, or receive them from there. */
static void exchange(double *u, int columns, int first, int last, int rows, int sends, MPI_Comm network) {
  int parts;
  MPI_Comm_remote_size(network, &parts);
  for (int part = 0; part < parts; part++) {
    int from = first_row(rows, parts, part), to = first_row(rows, parts, part + 1);
    from = from > first ? from : first;
    to = to < last ? to : last;
    if (from >= to) continue;
    double *lines = u + (size_t)(from - first) * columns;
    if (sends)
      MPI_Send(lines, (to - from) * columns, MPI_DOUBLE, part, FIELD, network);
    else
      MPI_Recv(lines, (to - from) * columns, MPI_DOUBLE, part, FORECAST, network, MPI_STATUS_IGNORE);
  }
}

static void step(double *u, double *next, int lines, int columns, MPI_Comm solver) { /* u has a row more on each side */
  int rank, size;
  MPI_Comm_rank(solver, &rank);
  MPI_Comm_size(solver, &size);
  int up = (rank + size - 1) % size, down = (rank + 1) % size;
  MPI_Sendrecv(u + columns, columns, MPI_DOUBLE, up, 0, u + (size_t)(lines + 1) * columns, columns, MPI_DOUBLE, down, 0,
               solver, MPI_STATUS_IGNORE);
  MPI_Sendrecv(u + (size_t)lines * columns, columns, MPI_DOUBLE, down, 0, u, columns, MPI_DOUBLE, up, 0, solver,
               MPI_STATUS_IGNORE);
  for (int i = 1; i <= lines; i++)
    for (int j = 0; j < columns; j++) {
      double *c = u + (size_t)i * columns;
      double around = c[j - columns] + c[j + columns] + c[(j + 1) % columns] + c[(j + columns - 1) % columns];
      next[(size_t)i * columns + j] = c[j] + DT * (DIFFUSION * (around - 4 * c[j]) + c[j] - c[j] * c[j] * c[j]);
    }
}

int main(int argc, char **argv) {
  MPI_Comm solver, network;
  MPI_Init(&argc, &argv);
  split_world(&solver, &network);
  int rank, size, plan[4] = {96, 96, 79, 10}; /* rows, columns, last frame, tests */
  MPI_Comm_rank(solver, &rank);
  MPI_Comm_size(solver, &size);
  for (int i = 1; i < argc && i <= 4; i++) plan[i - 1] = atoi(argv[i]);
  MPI_Bcast(plan, 4, MPI_INT, rank == 0 ? MPI_ROOT : MPI_PROC_NULL, network);
  int rows = plan[0], columns = plan[1], first = first_row(rows, size, rank), last = first_row(rows, size, rank + 1);
  int lines = last - first;
  double *u = calloc((size_t)(lines + 2) * columns, sizeof(double)), *next = malloc((size_t)(lines + 2) * columns * 8);
  double *forecast = malloc((size_t)lines * columns * 8), *before = malloc((size_t)lines * columns * 8);
  for (int frame = 0; frame <= plan[2]; frame++) {
    double error[2] = {0, 0}, sum[2];
    if (frame % 20 == 0) /* a new random state, the same on every number of ranks */
      for (int i = 0; i < lines * columns; i++) {
        unsigned long long x = (unsigned long long)(first * columns + i) + 1000003ULL * frame;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL, x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
        u[columns + i] = 2.0 * ((x ^ (x >> 31)) >> 11) / 9007199254740992.0 - 1.0;
      }
    for (int n = 0; n < STEPS_OF_A_FRAME; n++) {
      step(u, next, lines, columns, solver);
      double *swap = u;
      u = next, next = swap;
    }
    if (frame > plan[2] - plan[3] && frame % 20 != 0) { /* the forecast of this frame from the one before it */
      exchange(forecast, columns, first, last, rows, 0, network);
      for (int i = 0; i < lines * columns; i++)
        error[0] += pow(forecast[i] - u[columns + i], 2), error[1] += pow(before[i] - u[columns + i], 2);
      MPI_Reduce(error, sum, 2, MPI_DOUBLE, MPI_SUM, 0, solver);
      if (rank == 0)
        printf("solver: frame %d: root mean square error of the network %.4f, of persistence %.4f\n", frame,
               sqrt(sum[0] / rows / columns), sqrt(sum[1] / rows / columns));
    }
    for (int i = 0; i < lines * columns; i++) before[i] = u[columns + i];
    exchange(before, columns, first, last, rows, 1, network);
  }
  free(u), free(next), free(forecast), free(before);
  MPI_Comm_free(&network);
  MPI_Comm_free(&solver);
  MPI_Finalize();
  return 0;
}
