// What the host half needs of a library and its GPU runtime; implemented once for each (library_nvshmem.cu, library_mori.cpp).
// Every function throws std::runtime_error that says what failed and with which code.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace odc {

// Indices of kernel_names.
enum Kernel { kGet, kPut, kSignal, kWait, kSumFloat32, kSumFloat64, kFillPattern, kCheckPattern, kKernels };

constexpr const char* kernel_names[kKernels] = {"odc_get",         "odc_put",         "odc_signal",       "odc_wait",
                                                "odc_sum_float32", "odc_sum_float64", "odc_fill_pattern", "odc_check_pattern"};

namespace library {

// The version whose headers this was compiled against, and the one that is loaded ("" where the library does not tell).
std::string built_version();
std::string loaded_version();

bool initialized();                       // by anybody in this process
std::vector<uint8_t> unique_id();         // by rank 0, for all
void init(int rank, int ranks, const std::vector<uint8_t>& id);  // collective
int rank();
void load_kernels(const std::string& code_object);  // after init; "" where the kernels are linked in
void* allocate(size_t bytes);             // collective, the same size everywhere
void release(void* memory);               // collective
uint64_t peer_address(void* memory, int pe);  // where the memory of `pe` is mapped here; 0: it is not

// The GPU runtime, on the current device.
void* device_allocate(size_t bytes);      // zeroed
void device_release(void* memory);
void* host_allocate(size_t bytes);        // zeroed, at the same address for host and device
void host_release(void* memory);
uint64_t clock_ticks_per_ms();            // of odc::now()
void launch(Kernel kernel, unsigned columns, unsigned rows, unsigned threads, void** arguments, void* stream);

}  // namespace library
}  // namespace odc
