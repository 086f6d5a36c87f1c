// What the host gives to a kernel: plain structures, passed by value, the same for every library and compiler.
//
// Addresses are 64-bit numbers. A place in another PE's arena is given twice: `symmetric` is the same place in this PE's own arena, which is
// how both libraries name remote memory; `peer` is where that PE's memory is mapped here, or 0 if only the network reaches it.
#pragma once
#include <cstdint>

namespace odc {

constexpr int kBatch = 32;                           // transfers, signals or waits of one launch
constexpr int kSources = 64;                         // addends of one launch
constexpr uint64_t kRequestBytes = uint64_t(1) << 30;  // one work request: the length field of the network cards has 32 bits

enum Failure : uint64_t { kNoFailure = 0, kWaitTimedOut = 1, kPatternDiffers = 2, kClaimed = ~uint64_t(0) };

// The first thing that went wrong. Later kernels of the same arena see `code` and do nothing, so nobody builds upon it.
struct Status {
  uint64_t code;      // Failure
  uint64_t who;       // PE
  uint64_t what;      // offset in the arena
  uint64_t expected;
  uint64_t found;
};

struct Context {
  uint64_t arena;     // address of this PE's arena
  Status* claimed;    // in device memory: what kernels look at
  Status* reported;   // in host memory: what the host looks at
};

struct Transfer {
  uint64_t local;             // here: written by a get, read by a put
  uint64_t symmetric;         // there
  uint64_t peer;
  uint64_t bytes;
  uint64_t symmetric_signal;  // stored there after the data of a put has arrived; 0: no signal
  uint64_t peer_signal;
  uint64_t value;
  int32_t pe;
  int32_t unused;
};

struct Transfers {
  Transfer of[kBatch];
};

struct Wait {
  uint64_t address;   // in this PE's arena
  uint64_t at_least;
  int32_t pe;         // whose store is awaited, for the report
  int32_t unused;
};

struct Waits {
  Wait of[kBatch];
};

struct Sources {
  uint64_t address[kSources];
};

static_assert(sizeof(Transfer) == 64 && sizeof(Wait) == 24 && sizeof(Context) == 24 && sizeof(Status) == 40);
static_assert(sizeof(Context) + sizeof(Transfers) <= 4000, "kernel arguments may have 4 KiB in all");

}  // namespace odc
