// The allocator of the device and that of pinned memory of the host.
#include "late.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace late {
namespace {

constexpr size_t kRound = 512;
constexpr int kNothing = 0xFF; // no number in every type of floats

struct Use {
  c10::Stream stream;
  uint64_t task;
};

struct Block {
  void* data;
  size_t nbytes;
  size_t requested;
  c10::Stream stream;
  std::vector<c10::Stream> other_streams;
  std::vector<Use> uses; // that must be done before the memory is lent again
};

std::recursive_mutex mutex;
std::vector<Block*> returned;
c10::CachingDeviceAllocator::DeviceStats stats[kDevices];
size_t reserved[kDevices] = {0, 0};
int64_t limit = 1ll << 40;

bool can_be_lent(const Block& block) {
  for (auto& use : block.uses)
    if (!is_done(use.stream, use.task))
      return false;
  return true;
}

void give_back(void* context) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto* block = static_cast<Block*>(context);
  auto& theirs = stats[block->stream.device_index()];
  theirs.requested_bytes[0].decrease(block->requested);
  theirs.allocated_bytes[0].decrease(block->nbytes);
  theirs.allocation[0].decrease(1);
  for (auto& stream : block->other_streams)
    block->uses.push_back({stream, last_task(stream)});
  block->other_streams.clear();
  returned.push_back(block);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto device = current_device();
    c10::Device where(kLate, device);
    if (nbytes == 0)
      return {nullptr, nullptr, &give_back_nothing, where};
    size_t rounded = (nbytes + kRound - 1) / kRound * kRound;
    auto stream = current_stream(device);
    auto in_use = stats[device].allocated_bytes[0].current;
    if (in_use + int64_t(rounded) > limit)
      ++stats[device].num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        in_use + int64_t(rounded) <= limit,
        "late:", int(device), " is out of memory: ", rounded, " bytes are asked for, ",
        in_use, " of ", limit, " are in use");
    Block* block = find(rounded, stream);
    if (block == nullptr) {
      block = new Block{std::malloc(rounded), rounded, nbytes, stream, {}, {}};
      reserved[device] += rounded;
      stats[device].reserved_bytes[0].increase(rounded);
    }
    block->requested = nbytes;
    stats[device].requested_bytes[0].increase(nbytes);
    stats[device].allocated_bytes[0].increase(rounded);
    stats[device].allocation[0].increase(1);
    void* data = block->data;
    enqueue(stream, [data, rounded] { std::memset(data, kNothing, rounded); });
    return {data, block, &give_back, where};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    enqueue(current_stream(current_device()), [=] { std::memcpy(to, from, nbytes); });
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data.get_context(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    stats[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    stats[device].requested_bytes[0].reset_peak();
    stats[device].allocated_bytes[0].reset_peak();
    stats[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto in_use = size_t(stats[device].allocated_bytes[0].current);
    return {size_t(limit) - std::min(size_t(limit), in_use), size_t(limit)};
  }

 private:
  static void give_back_nothing(void*) {}

  static Block* find(size_t nbytes, c10::Stream stream) {
    for (size_t i = returned.size(); i-- > 0;) {
      Block* block = returned[i];
      if (block->nbytes == nbytes && block->stream == stream && can_be_lent(*block)) {
        returned.erase(returned.begin() + int64_t(i));
        block->uses.clear();
        return block;
      }
    }
    return nullptr;
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(kLate, &device_memory);

struct PinnedBlock {
  void* data;
  size_t nbytes;
  std::vector<Use> uses;
};

std::map<const void*, PinnedBlock*> pinned;
std::vector<PinnedBlock*> pinned_returned;

PinnedBlock* find_pinned(const void* data) {
  auto after = pinned.upper_bound(data);
  if (after == pinned.begin())
    return nullptr;
  auto* block = std::prev(after)->second;
  return static_cast<const char*>(data) < static_cast<char*>(block->data) + block->nbytes
      ? block
      : nullptr;
}

// As CUDA's allocator, it lends memory again only when the copies to and from it are done.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    c10::Device host(c10::DeviceType::CPU);
    if (nbytes == 0)
      return {nullptr, nullptr, &give_back_pinned, host};
    PinnedBlock* block = nullptr;
    for (size_t i = pinned_returned.size(); i-- > 0 && block == nullptr;) {
      auto* found = pinned_returned[i];
      bool is_free = found->nbytes == nbytes;
      for (auto& use : found->uses)
        is_free = is_free && is_done(use.stream, use.task);
      if (is_free) {
        block = found;
        block->uses.clear();
        pinned_returned.erase(pinned_returned.begin() + int64_t(i));
      }
    }
    if (block == nullptr)
      block = new PinnedBlock{std::malloc(nbytes), nbytes, {}};
    pinned[block->data] = block;
    std::memset(block->data, kNothing, nbytes);
    return {block->data, block, &give_back_pinned, host};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back_pinned;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }

 private:
  static void give_back_pinned(void* context) {
    if (context == nullptr)
      return;
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto* block = static_cast<PinnedBlock*>(context);
    pinned.erase(block->data);
    pinned_returned.push_back(block);
  }
};

PinnedMemory pinned_memory;

} // namespace

c10::Allocator* pinned_allocator() {
  return &pinned_memory;
}

void record_stream(void* context, c10::Stream stream) {
  if (context == nullptr)
    return;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  static_cast<Block*>(context)->other_streams.push_back(stream);
}

void set_limit(int64_t nbytes) {
  limit = nbytes;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return find_pinned(data) != nullptr;
}

void note_pinned_use(const void* data, c10::Stream stream, uint64_t task) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (auto* block = find_pinned(data))
    block->uses.push_back({stream, task});
}

} // namespace late
