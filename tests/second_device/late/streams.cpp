// Streams, events and the guard through which PyTorch reaches them.
#include "late.h"

#include <c10/core/Allocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <deque>
#include <exception>
#include <mutex>
#include <vector>

namespace late {
namespace {

struct Queue {
  std::deque<Task> tasks;
  uint64_t num_queued = 0;
  uint64_t num_done = 0;
};

constexpr int kStreams = 32;
std::recursive_mutex mutex;
Queue queues[kDevices][kStreams];
int num_streams[kDevices] = {1, 1};
Order order = Order::kStreamsLast;
std::exception_ptr failure;

thread_local c10::DeviceIndex device_now = 0;
thread_local int stream_now[kDevices] = {0, 0};

Queue& queue_of(c10::Stream stream) {
  return queues[stream.device_index()][stream.id()];
}

c10::Stream make_stream(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLate, device), id);
}

void run_task(const Task& task) {
  OutsideModes outside;
  try {
    task();
  } catch (...) {
    if (!failure)
      failure = std::current_exception(); // whoever waits on the host gets it
  }
}

void raise_failure() {
  if (failure) {
    auto raised = failure;
    failure = nullptr;
    std::rethrow_exception(raised);
  }
}

} // namespace

OutsideModes::OutsideModes()
    : guard(
          c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
          c10::default_excluded_set | c10::autograd_dispatch_keyset |
              c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)) {}

void set_order(Order wanted) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  order = wanted;
}

c10::DeviceIndex current_device() {
  return device_now;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  auto before = device_now;
  if (device >= 0) {
    TORCH_CHECK(device < kDevices, "there is no late:", int(device));
    device_now = device;
  }
  return before;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  device = device < 0 ? device_now : device;
  return make_stream(device, stream_now[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  stream_now[stream.device_index()] = int(stream.id());
  return before;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  device = device < 0 ? device_now : device;
  int id = num_streams[device] < kStreams ? num_streams[device]++ : kStreams - 1;
  return make_stream(device, id);
}

uint64_t enqueue(c10::Stream stream, Task task) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& queue = queue_of(stream);
  queue.tasks.push_back(std::move(task));
  auto number = ++queue.num_queued;
  if (order == Order::kStreamsFirst && stream.id() != 0)
    run_until(stream, number);
  return number;
}

uint64_t last_task(c10::Stream stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return queue_of(stream).num_queued;
}

bool is_done(c10::Stream stream, uint64_t task) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return queue_of(stream).num_done >= task;
}

void run_until(c10::Stream stream, uint64_t number) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& queue = queue_of(stream);
  while (queue.num_done < number) {
    auto task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    run_task(task);
    ++queue.num_done;
  }
}

void run_all(c10::DeviceIndex device) {
  for (int id = 0; id < num_streams[device]; ++id) {
    auto stream = make_stream(device, id);
    run_until(stream, last_task(stream));
  }
  raise_failure();
}

int64_t pending_tasks() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  int64_t count = 0;
  for (auto& device : queues)
    for (auto& queue : device)
      count += int64_t(queue.num_queued - queue.num_done);
  return count;
}

namespace {

struct LateEvent {
  c10::Stream stream;
  uint64_t task;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kLate;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kLate, exchange_device(device.index()));
  }
  c10::Device getDevice() const override {
    return c10::Device(kLate, current_device());
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(device.index() < 0 ? current_device() : device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_done(stream, last_task(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    run_until(stream, last_task(stream));
    raise_failure();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    run_all(device < 0 ? current_device() : device);
  }
  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex,
      const c10::EventFlag) const override {
    delete static_cast<LateEvent*>(*event);
    *event = new LateEvent{stream, last_task(stream)};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<LateEvent*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr)
      return; // it was never recorded
    auto wanted = *static_cast<LateEvent*>(event);
    enqueue(stream, [wanted] { run_until(wanted.stream, wanted.task); });
  }
  bool queryEvent(void* event) const override {
    auto* wanted = static_cast<LateEvent*>(event);
    return wanted == nullptr || is_done(wanted->stream, wanted->task);
  }
  void synchronizeEvent(void* event) const override {
    if (auto* wanted = static_cast<LateEvent*>(event))
      run_until(wanted->stream, wanted->task);
    raise_failure();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get_context(), stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace
} // namespace late
