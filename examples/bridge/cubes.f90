! A Fortran program that answers a network: it finds the ranks of the other program, and gives them to answer_cubes of
! cube.f90. It uses mpi_f08, which a system's MPI has for its Fortran compiler and the wheels of MPIs have not.
program cubes
  use mpi_f08
  use programs, only: split_world ! examples/mpmd/split_world.f90
  implicit none
  interface
    subroutine answer_cubes(mine, other, rank, ranks) bind(c)
      use iso_c_binding, only: c_int
      integer(c_int), value :: mine, other, rank, ranks
    end subroutine
  end interface
  type(MPI_Comm) :: mine, other
  integer :: rank, ranks
  call MPI_Init()
  call split_world(mine, other)
  call MPI_Comm_rank(mine, rank)
  call MPI_Comm_size(mine, ranks)
  call answer_cubes(mine%MPI_VAL, other%MPI_VAL, rank, ranks)
  call MPI_Comm_free(other)
  call MPI_Comm_free(mine)
  call MPI_Finalize()
end program
