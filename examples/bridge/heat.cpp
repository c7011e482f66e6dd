// Heat in a plate that radiates: u_t = D (u_xx + u_yy) - C u^4, with edges at temperature 0. Each rank has some rows.
//
//     mpicxx -O2 -I $(python -c "import tplayers.bridge as b; print(b.include())") -o heat heat.cpp
//     mpiexec -n 2 ./heat [N STEPS] : -n 2 python heating.py
//
// The other program of the job gives a temperature, and this one answers with that of STEPS steps later. Asked for the
// gradient of such a call, it runs the adjoint of its steps backwards, through the states that it has kept.
#include <map>
#include <vector>

#include "commengine_bridge.h"

using Field = std::vector<double>;

class Plate {
 public:
  Plate(MPI_Comm comm, int points) : comm_(comm), n_(points) {
    MPI_Comm_rank(comm, &rank_), MPI_Comm_size(comm, &size_);
    first_ = begin(rank_), rows_ = begin(rank_ + 1) - first_;
  }
  bridge_field field() const {
    return {2, 1, {n_, n_, 0, 0}, {first_, 0, 0, 0}, {first_ + rows_, n_, 0, 0}, MPI_DOUBLE};
  }
  Field step(const Field &u) const {
    Field next = u;
    add_diffusion(u, next);
    for (size_t i = 0; i < u.size(); i++) next[i] -= STEP * LOSS * u[i] * u[i] * u[i] * u[i];
    return next;
  }
  // The gradient by u of what has the gradient g by step(u). The diffusion is its own transpose.
  Field adjoint(const Field &u, const Field &g) const {
    Field back = g;
    add_diffusion(g, back);
    for (size_t i = 0; i < u.size(); i++) back[i] -= STEP * LOSS * 4 * u[i] * u[i] * u[i] * g[i];
    return back;
  }
  Field block() const { return Field(size_t(rows_) * n_); }

 private:
  static constexpr double STEP = 0.1, DIFFUSION = 0.5, LOSS = 0.3;

  int begin(int rank) const { return int(1LL * rank * n_ / size_); }

  void add_diffusion(const Field &u, Field &to) const {
    Field above(n_), below(n_);
    int up = rank_ ? rank_ - 1 : MPI_PROC_NULL, down = rank_ + 1 < size_ ? rank_ + 1 : MPI_PROC_NULL;
    const double *first = u.data(), *last = u.data() + size_t(rows_ - 1) * n_;
    MPI_Sendrecv(last, n_, MPI_DOUBLE, down, 0, above.data(), n_, MPI_DOUBLE, up, 0, comm_, MPI_STATUS_IGNORE);
    MPI_Sendrecv(first, n_, MPI_DOUBLE, up, 1, below.data(), n_, MPI_DOUBLE, down, 1, comm_, MPI_STATUS_IGNORE);
    for (int i = 0; i < rows_; i++)
      for (int j = 0; j < n_; j++) {
        const double *c = u.data() + size_t(i) * n_ + j;
        double around = (i ? c[-n_] : above[j]) + (i + 1 < rows_ ? c[n_] : below[j]);
        around += (j ? c[-1] : 0) + (j + 1 < n_ ? c[1] : 0);
        to[size_t(i) * n_ + j] += STEP * DIFFUSION * (around - 4 * *c);
      }
  }

  MPI_Comm comm_;
  int n_, rank_, size_, first_, rows_;
};

// The ranks of this program, and an intercommunicator to the only other one: the C side of launch.split_world.
static void split_world(MPI_Comm *mine, MPI_Comm *other) {
  int rank, size, *set_by_launcher, set, color = 0, first = 0, leader = -1;  // 0: srun sets no MPI_APPNUM
  MPI_Comm_rank(MPI_COMM_WORLD, &rank), MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &set_by_launcher, &set);
  if (set) color = *set_by_launcher;
  std::vector<int> colors(size);
  MPI_Allgather(&color, 1, MPI_INT, colors.data(), 1, MPI_INT, MPI_COMM_WORLD);
  for (int r = size - 1; r >= 0; r--) (colors[r] == color ? first : leader) = r;  // the lowest ranks of both programs
  for (int r = 0; r < size && leader >= 0; r++)
    if (colors[r] != color && colors[r] != colors[leader]) leader = -1;  // there is a third program
  if (leader < 0) {
    if (rank == first) fprintf(stderr, "heat: a job has two programs, built for one MPI: mpiexec -n 2 ./heat : -n 2 "
                                       "python ... starts both\n");
    for (double end = MPI_Wtime() + 0.5; MPI_Wtime() < end;) continue;  // launchers lose lines that come just before
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Comm_split(MPI_COMM_WORLD, color, 0, mine);
  MPI_Intercomm_create(*mine, 0, MPI_COMM_WORLD, leader, 20000, other);
}

int main(int argc, char **argv) {
  MPI_Comm mine, other;
  MPI_Init(&argc, &argv);
  split_world(&mine, &other);
  int points = argc > 1 ? atoi(argv[1]) : 48, steps = argc > 2 ? atoi(argv[2]) : 30;
  {
    Plate plate(mine, points);
    bridge b = bridge_open(mine, other, plate.field(), plate.field());
    std::map<long long, std::vector<Field>> kept;  // the states of a call, for its gradient
    long long number;
    for (int what, keep; (what = bridge_next(&b, &number, &keep)) != BRIDGE_END;) {
      if (what == BRIDGE_FORGET) {
        kept.erase(number);
        continue;
      }
      Field u = plate.block();
      bridge_take(&b, u.data());
      if (what == BRIDGE_CALL)
        for (int n = 0; n < steps; n++) {
          if (keep) kept[number].push_back(u);
          u = plate.step(u);
        }
      else
        for (int n = steps; n-- > 0;) u = plate.adjoint(kept[number][n], u);
      bridge_answer(&b, u.data());
    }
    bridge_close(&b, 0);
  }
  MPI_Comm_free(&other), MPI_Comm_free(&mine);
  MPI_Finalize();
}
