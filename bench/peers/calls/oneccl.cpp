// oneCCL's collectives on the host, each as one loop in C++ over the library's calls.
//
// bench/peers/calls/compiled.py compiles this file, and calls the functions below on every rank of a job of Intel's MPI.
#include <oneapi/ccl.hpp>

#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>
#include <unistd.h>

namespace {

enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL, SENDRECV, BARRIER };

std::unique_ptr<ccl::communicator> group;
std::string problem;
char *send_, *recv_;
int rank_, size_;

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

void call(int operation, ccl::datatype dtype, size_t width, size_t count, int root, bool in_place) {
    auto sum = ccl::reduction::sum;
    char *from = in_place ? recv_ : send_;
    switch (operation) {
    case ALL_REDUCE: ccl::allreduce(from, recv_, count, dtype, sum, *group).wait(); break;
    case REDUCE_SCATTER: ccl::reduce_scatter(send_, recv_, count, dtype, sum, *group).wait(); break;
    case ALL_GATHER: ccl::allgather(in_place ? recv_ + rank_ * count * width : send_, recv_, count, dtype, *group).wait(); break;
    case BROADCAST: ccl::broadcast(in_place || rank_ != root ? recv_ : send_, recv_, count, dtype, root, *group).wait(); break;
    case REDUCE: ccl::reduce(from, recv_, count, dtype, sum, root, *group).wait(); break;
    case ALL_TO_ALL: ccl::alltoall(send_, recv_, count, dtype, *group).wait(); break;
    case SENDRECV: {
        ccl::group_start();
        auto sent = ccl::send(send_, count, dtype, (rank_ + 1) % size_, *group);
        auto received = ccl::recv(recv_, count, dtype, (rank_ + size_ - 1) % size_, *group);
        ccl::group_end();
        sent.wait();
        received.wait();
        break;
    }
    case BARRIER: ccl::barrier(*group).wait(); break;
    default: throw std::runtime_error("oneCCL does not run this operation");
    }
}

} // namespace

extern "C" {

const char *open_group(int rank, int size, const char *folder, size_t capacity, void **send, void **recv) try {
    std::string name = std::string(folder) + "/oneccl", part = name + ".part";
    rank_ = rank, size_ = size;
    ccl::init();
    ccl::shared_ptr_class<ccl::kvs> store;
    ccl::kvs::address_type address;
    if (rank == 0) {
        store = ccl::create_main_kvs();
        address = store->get_address();
        std::ofstream(part, std::ios::binary).write(address.data(), address.size());
        rename(part.c_str(), name.c_str());
    } else {
        for (int tries = 0; access(name.c_str(), R_OK) && tries < 60000; tries++) usleep(1000);
        std::ifstream(name, std::ios::binary).read(address.data(), address.size());
        store = ccl::create_kvs(address);
    }
    group = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, store));
    if (posix_memalign(send, 4096, capacity + 4096) || posix_memalign(recv, 4096, capacity + 4096)) return "no memory";
    send_ = static_cast<char *>(*send), recv_ = static_cast<char *>(*recv);
    return nullptr;
} catch (const std::exception &error) {
    problem = error.what();
    return problem.c_str();
}

const char *run_calls(int operation, int dtype, size_t count, int root, int in_place, int calls, double *starts, double *seconds) try {
    auto type = dtype == 0 ? ccl::datatype::float32 : ccl::datatype::bfloat16;
    for (int index = 0; index < calls; index++) {
        ccl::barrier(*group).wait();
        starts[index] = now();
        call(operation, type, dtype == 0 ? 4 : 2, count, root, in_place);
        seconds[index] = now() - starts[index];
    }
    return nullptr;
} catch (const std::exception &error) {
    problem = error.what();
    return problem.c_str();
}

} // extern "C"
