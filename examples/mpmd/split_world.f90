! The ranks of this program, and an intercommunicator to the only other one: the Fortran side of launch.split_world.
module programs
  use iso_fortran_env, only: error_unit
  use mpi_f08
  implicit none
contains
  subroutine split_world(mine, other)
    type(MPI_Comm), intent(out) :: mine, other
    integer, allocatable :: colors(:)
    integer(MPI_ADDRESS_KIND) :: set_by_launcher
    integer :: color, leader, ranks, rank
    double precision :: ends
    logical :: set
    call MPI_Comm_rank(MPI_COMM_WORLD, rank)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks)
    call MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, set_by_launcher, set)
    color = 0 ! srun sets no MPI_APPNUM
    if (set) color = int(set_by_launcher)
    allocate(colors(0:ranks - 1))
    call MPI_Allgather(color, 1, MPI_INTEGER, colors, 1, MPI_INTEGER, MPI_COMM_WORLD)
    do leader = 0, ranks - 1 ! ends at the lowest rank of the other program
      if (colors(leader) /= color) exit
    end do
    if (leader < ranks) then
      if (any(colors /= color .and. colors /= colors(leader))) leader = ranks ! there is a third program
    end if
    if (leader == ranks) then
      if (rank == findloc(colors, color, dim=1) - 1) write (error_unit, '(a)') & ! the lowest rank of this program
        "a job has two programs: mpiexec -n 2 ./solver : -n 2 python ..."
      flush (error_unit)
      ends = MPI_Wtime() + 0.5 ! launchers lose lines that come just before
      do while (MPI_Wtime() < ends)
      end do
      call MPI_Abort(MPI_COMM_WORLD, 2)
    end if
    call MPI_Comm_split(MPI_COMM_WORLD, color, 0, mine)
    call MPI_Intercomm_create(mine, 0, MPI_COMM_WORLD, leader, 20000, other)
  end subroutine split_world
end module programs
