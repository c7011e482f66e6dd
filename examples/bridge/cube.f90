! A Fortran program that answers: the field a(x, y, channel) goes to a**3 * x. Its gradient is 3 a**2 * x times that
! of the result. Each rank has some columns of 5 x 7 points and 2 channels. mine, other: as mine%MPI_VAL of mpi_f08.
! cubes.f90 is the program around it.
subroutine answer_cubes(mine, other, rank, ranks) bind(c)
  use iso_c_binding
  use commengine_bridge
  implicit none
  integer(c_int), value :: mine, other, rank, ranks
  type(bridge) :: b
  type(bridge_field) :: field
  real(c_double), allocatable :: a(:, :, :), kept(:, :, :)
  integer(c_long_long) :: number, kept_number
  integer :: what, first, last, x
  logical :: keep
  first = 1 + rank * 7 / ranks
  last = (rank + 1) * 7 / ranks
  kept_number = 0
  allocate (a(5, first:last, 2), kept(5, first:last, 2))
  field = bridge_block([5, 7], [1, first], [5, last], channels=2, bytes=8)
  b = bridge_open(mine, other, gives=field, takes=field)
  do
    what = bridge_next(b, number, keep)
    if (what == bridge_end) exit
    if (what == bridge_forgotten) cycle ! it keeps the last call only
    call bridge_take(b, a)
    if (what == bridge_gradient .and. number /= kept_number) error stop "cube.f90 keeps the last call only"
    if (what == bridge_call) kept = a
    if (what == bridge_call) kept_number = number
    do x = 1, 5
      if (what == bridge_call) a(x, :, :) = x * a(x, :, :)**3
      if (what == bridge_gradient) a(x, :, :) = 3 * x * kept(x, :, :)**2 * a(x, :, :)
    end do
    call bridge_answer(b, a)
  end do
  call bridge_close(b, ends=.false.)
end subroutine
