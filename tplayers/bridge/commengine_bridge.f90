! Fields and gradients between two programs of one MPI job: the side of Fortran. docs/bridge.md has the protocol.
! Compile commengine_bridge_fortran.c with mpicc, and link both. The calls are those of commengine_bridge.h.
module commengine_bridge
  use iso_c_binding, only: c_int, c_long_long, c_ptr, c_null_ptr
  implicit none
  private
  public :: bridge, bridge_field, bridge_block, bridge_open, bridge_next, bridge_take, bridge_answer, bridge_ask, &
            bridge_forget, bridge_close, bridge_end, bridge_call, bridge_gradient, bridge_forgotten

  enum, bind(c)
    enumerator :: bridge_end = 0, bridge_call = 1, bridge_gradient = 2, bridge_forgotten = 3
  end enum

  type, bind(c) :: bridge_field
    integer(c_int) :: axes, channels, bytes
    integer(c_long_long) :: points(4), start(4), stop(4)
  end type

  type :: bridge
    type(c_ptr) :: handle = c_null_ptr
  end type

  interface
    function bridge_open_f(mine, other, gives, takes) bind(c)
      import
      integer(c_int), value :: mine, other
      type(bridge_field), intent(in) :: gives, takes
      type(c_ptr) :: bridge_open_f
    end function
    function bridge_next_f(b, number, keep) bind(c)
      import
      type(c_ptr), value :: b
      integer(c_long_long), intent(out) :: number
      integer(c_int), intent(out) :: keep
      integer(c_int) :: bridge_next_f
    end function
    subroutine bridge_take_f(b, block) bind(c)
      import
      type(c_ptr), value :: b
      type(*) :: block(*)
    end subroutine
    subroutine bridge_answer_f(b, block) bind(c)
      import
      type(c_ptr), value :: b
      type(*) :: block(*)
    end subroutine
    function bridge_ask_f(b, what, number, keep, give, take) bind(c)
      import
      type(c_ptr), value :: b
      integer(c_int), value :: what, keep
      integer(c_long_long), value :: number
      type(*) :: give(*), take(*)
      integer(c_long_long) :: bridge_ask_f
    end function
    subroutine bridge_forget_f(b, number) bind(c)
      import
      type(c_ptr), value :: b
      integer(c_long_long), value :: number
    end subroutine
    subroutine bridge_close_f(b, ends) bind(c)
      import
      type(c_ptr), value :: b
      integer(c_int), value :: ends
    end subroutine
  end interface

contains

  ! This rank's block of a field. points: of the whole field. first, last: the rank's, from 1 on. The array in memory is
  ! a(points of axis 1, ..., channels): the first axis runs fastest, so it is the last axis of a C or Python program.
  function bridge_block(points, first, last, channels, bytes) result(f)
    integer, intent(in) :: points(:), first(:), last(:), channels, bytes
    type(bridge_field) :: f
    integer :: n
    n = size(points)
    f%axes = n
    f%channels = channels
    f%bytes = bytes
    f%points = 0
    f%start = 0
    f%stop = 0
    f%points(1:n) = points(n:1:-1)
    f%start(1:n) = first(n:1:-1) - 1
    f%stop(1:n) = last(n:1:-1)
  end function

  ! mine, other: the integer handles of the communicators (mine%MPI_VAL of mpi_f08).
  function bridge_open(mine, other, gives, takes) result(b)
    integer, intent(in) :: mine, other
    type(bridge_field), intent(in) :: gives, takes
    type(bridge) :: b
    b%handle = bridge_open_f(mine, other, gives, takes)
  end function

  integer function bridge_next(b, number, keep)
    type(bridge), intent(in) :: b
    integer(c_long_long), intent(out) :: number
    logical, intent(out) :: keep
    integer(c_int) :: kept
    bridge_next = bridge_next_f(b%handle, number, kept)
    keep = kept /= 0
  end function

  subroutine bridge_take(b, block)
    type(bridge), intent(in) :: b
    type(*) :: block(*)
    call bridge_take_f(b%handle, block)
  end subroutine

  subroutine bridge_answer(b, block)
    type(bridge), intent(in) :: b
    type(*) :: block(*)
    call bridge_answer_f(b%handle, block)
  end subroutine

  integer(c_long_long) function bridge_ask(b, what, number, keep, give, take)
    type(bridge), intent(in) :: b
    integer, intent(in) :: what
    integer(c_long_long), intent(in) :: number
    logical, intent(in) :: keep
    type(*) :: give(*), take(*)
    bridge_ask = bridge_ask_f(b%handle, what, number, merge(1, 0, keep), give, take)
  end function

  subroutine bridge_forget(b, number)
    type(bridge), intent(in) :: b
    integer(c_long_long), intent(in) :: number
    call bridge_forget_f(b%handle, number)
  end subroutine

  subroutine bridge_close(b, ends)
    type(bridge), intent(inout) :: b
    logical, intent(in) :: ends
    call bridge_close_f(b%handle, merge(1, 0, ends))
    b%handle = c_null_ptr
  end subroutine
end module
