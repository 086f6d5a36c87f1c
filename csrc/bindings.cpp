// The Python module: the library's set-up and one function for each kernel. Nothing is planned or checked here: which transfers, in which
// order, in batches of at most kBatch, on how many blocks, and that every range lies inside its arena, is decided and tested in Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "arguments.h"
#include "library.h"

namespace py = pybind11;

namespace odc {
namespace {

constexpr unsigned kThreads = 512;

// (address here, the same place in this arena, its mapped address or 0, bytes, signal in this arena or 0, mapped signal or 0, value, PE)
using TransferTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, int32_t>;
using WaitTuple = std::tuple<uint64_t, uint64_t, int32_t>;  // address, at least, PE

template <typename Tuples>
unsigned batch_size(const Tuples& items, int most) {
  if (items.empty() || items.size() > size_t(most))
    throw std::invalid_argument("a launch takes 1 to " + std::to_string(most) + " items, not " + std::to_string(items.size()));
  return unsigned(items.size());
}

Transfers transfers_of(const std::vector<TransferTuple>& tuples) {
  Transfers transfers{};
  for (size_t i = 0; i < tuples.size(); ++i) {
    const auto& [local, symmetric, peer, bytes, signal, peer_signal, value, pe] = tuples[i];
    transfers.of[i] = {local, symmetric, peer, bytes, signal, peer_signal, value, pe, 0};
  }
  return transfers;
}

// The part of the DLPack C interface that hands over one-dimensional bytes. Unlike __cuda_array_interface__ it names the device: memory of a
// peer that is mapped here would else be taken for the peer's and copied.
struct DlpackTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;  // unsigned integers of 8 bits
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
  void* owner;
  void (*deleter)(DlpackTensor*);
  int64_t nbytes;      // ours, behind the interface: what `shape` points to
};

// A capsule for torch.from_dlpack; whoever uses it keeps the memory alive.
py::capsule view(uint64_t address, int64_t nbytes, int device_type, int device_id) {
  auto* tensor = new DlpackTensor{reinterpret_cast<void*>(address), device_type, device_id, 1, 1, 8, 1, nullptr, nullptr, 0, nullptr,
                                  [](DlpackTensor* self) { delete self; }, nbytes};
  tensor->shape = &tensor->nbytes;
  return py::capsule(tensor, "dltensor", [](PyObject* capsule) {
    // A consumer renames the capsule and then owns the tensor.
    if (PyCapsule_IsValid(capsule, "dltensor")) delete static_cast<DlpackTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  });
}

// One PE's end of an arena, and the status word that its kernels share.
class Arena {
 public:
  Arena(size_t bytes) : memory_(library::allocate(bytes)) {
    context_.arena = reinterpret_cast<uint64_t>(memory_);
    context_.claimed = static_cast<Status*>(library::device_allocate(sizeof(Status)));
    context_.reported = static_cast<Status*>(library::host_allocate(sizeof(Status)));
  }

  uint64_t address() const { return context_.arena; }
  uint64_t peer_address(int pe) const { return library::peer_address(memory_, pe); }

  // (code, PE, offset, expected, found) of the first failure; code 0: none. Needs no synchronisation.
  std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t> status() const {
    const uint64_t code = __atomic_load_n(&context_.reported->code, __ATOMIC_ACQUIRE);
    const Status& s = *context_.reported;
    return {code, s.who, s.what, s.expected, s.found};
  }

  void get(const std::vector<TransferTuple>& items, unsigned blocks, uint64_t stream) { transfer(kGet, items, blocks, kThreads, stream); }
  void put(const std::vector<TransferTuple>& items, unsigned blocks, uint64_t stream) { transfer(kPut, items, blocks, kThreads, stream); }
  void signal(const std::vector<TransferTuple>& items, uint64_t stream) { transfer(kSignal, items, 1, 64, stream); }

  void wait(const std::vector<WaitTuple>& items, uint64_t timeout_ms, uint64_t stream) {
    int count = int(batch_size(items, kBatch));
    Waits waits{};
    for (int i = 0; i < count; ++i) waits.of[i] = {std::get<0>(items[i]), std::get<1>(items[i]), std::get<2>(items[i]), 0};
    uint64_t ticks = timeout_ms * library::clock_ticks_per_ms();
    run(kWait, 1, 1, 64, stream, context_, waits, count, ticks);
  }

  void sum(bool wide, uint64_t out, const std::vector<uint64_t>& addresses, uint64_t count, bool add, unsigned blocks, uint64_t stream) {
    int n = int(batch_size(addresses, kSources));
    Sources sources{};
    std::copy(addresses.begin(), addresses.end(), sources.address);
    int plus = add;
    run(wide ? kSumFloat64 : kSumFloat32, blocks, 1, kThreads, stream, context_, out, sources, n, count, plus);
  }

  void fill_pattern(uint64_t to, uint64_t bytes, uint64_t seed, uint64_t stream) {
    run(kFillPattern, 8, 1, kThreads, stream, to, bytes, seed);
  }

  void check_pattern(uint64_t from, uint64_t bytes, uint64_t seed, int pe, uint64_t stream) {
    run(kCheckPattern, 8, 1, kThreads, stream, context_, from, bytes, seed, pe);
  }

  // Collective, after the last kernel. Without a call the memory stays until the process ends: no peer is waited for in a destructor.
  void release() {
    library::device_release(context_.claimed);
    library::host_release(context_.reported);
    library::release(memory_);
  }

 private:
  template <typename... Arguments>
  static void run(Kernel kernel, unsigned columns, unsigned rows, unsigned threads, uint64_t stream, Arguments&... arguments) {
    void* pointers[] = {&arguments...};
    library::launch(kernel, columns, rows, threads, pointers, reinterpret_cast<void*>(stream));
  }

  void transfer(Kernel kernel, const std::vector<TransferTuple>& items, unsigned blocks, unsigned threads, uint64_t stream) {
    unsigned rows = batch_size(items, kBatch);
    Transfers transfers = transfers_of(items);
    run(kernel, blocks, rows, threads, stream, context_, transfers);
  }

  void* memory_;
  Context context_{};
};

py::bytes to_bytes(const std::vector<uint8_t>& data) { return {reinterpret_cast<const char*>(data.data()), data.size()}; }

void init(int rank, int ranks, const std::string& id) { library::init(rank, ranks, {id.begin(), id.end()}); }

}  // namespace
}  // namespace odc

PYBIND11_MODULE(ODC_MODULE, m) {
  using namespace odc;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.attr("BATCH") = kBatch;
  m.attr("SOURCES") = kSources;
  m.def("built_version", &library::built_version);
  m.def("loaded_version", &library::loaded_version);
  m.def("initialized", &library::initialized);
  m.def("unique_id", [] { return to_bytes(library::unique_id()); });
  m.def("init", &init, py::arg("rank"), py::arg("ranks"), py::arg("id"), Unlocked());
  m.def("rank", &library::rank);
  m.def("view", &view, py::arg("address"), py::arg("nbytes"), py::arg("device_type"), py::arg("device_id"));
  m.def("load_kernels", &library::load_kernels, py::arg("code_object"), Unlocked());
  py::class_<Arena>(m, "Arena")
      .def(py::init<size_t>(), py::arg("nbytes"), Unlocked())
      .def("address", &Arena::address)
      .def("peer_address", &Arena::peer_address, py::arg("pe"))
      .def("status", &Arena::status)
      .def("get", &Arena::get, py::arg("transfers"), py::arg("blocks"), py::arg("stream"))
      .def("put", &Arena::put, py::arg("transfers"), py::arg("blocks"), py::arg("stream"))
      .def("signal", &Arena::signal, py::arg("transfers"), py::arg("stream"))
      .def("wait", &Arena::wait, py::arg("waits"), py::arg("timeout_ms"), py::arg("stream"))
      .def("sum", &Arena::sum, py::arg("wide"), py::arg("out"), py::arg("sources"), py::arg("count"), py::arg("add"), py::arg("blocks"),
           py::arg("stream"))
      .def("fill_pattern", &Arena::fill_pattern, py::arg("to"), py::arg("nbytes"), py::arg("seed"), py::arg("stream"))
      .def("check_pattern", &Arena::check_pattern, py::arg("source"), py::arg("nbytes"), py::arg("seed"), py::arg("pe"), py::arg("stream"))
      .def("release", &Arena::release, Unlocked());
}
