/* Starts MPI for examples/bridge/cube.f90, because the wheels of MPIs have no module for Fortran. */
#include <mpi.h>

void answer_cubes(int mine, int other, int rank, int ranks);

int main(int argc, char **argv) {
  MPI_Comm mine, other;
  int rank, size, *color, set;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &color, &set);
  int colors[64];
  MPI_Allgather(color, 1, MPI_INT, colors, 1, MPI_INT, MPI_COMM_WORLD);
  MPI_Comm_split(MPI_COMM_WORLD, *color, 0, &mine);
  int leader = 0, ranks;
  while (colors[leader] == *color) leader++;
  MPI_Intercomm_create(mine, 0, MPI_COMM_WORLD, leader, 20000, &other);
  MPI_Comm_size(mine, &ranks);
  answer_cubes(MPI_Comm_c2f(mine), MPI_Comm_c2f(other), rank, ranks);
  MPI_Comm_free(&other);
  MPI_Comm_free(&mine);
  MPI_Finalize();
  return 0;
}
