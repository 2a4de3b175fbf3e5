// A device whose memory is the host's, and which does everything as late as it may.
//
// Each stream is a queue of tasks. A task runs when somebody waits for it: the host, which reads a
// value, or another stream, through an event. So a missing wait gives wrong numbers in every run,
// not only in an unlucky one. Nothing here uses a thread or a clock.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <functional>

namespace late {

constexpr auto kLate = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

using Task = std::function<void()>;

// When the tasks of streams other than the default one run. Both are right for a program that
// waits where it must; each shows faults that the other hides.
enum class Order {
  kStreamsLast, // when somebody waits for them: shows who reads a copy before it is done
  kStreamsFirst, // as soon as they may: shows a copy that does not wait for what it reads
};

void set_order(Order order);

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

// Runs a block outside all modes and transforms that are active in this thread, below autograd.
struct OutsideModes {
  OutsideModes();
  c10::impl::ForceDispatchKeyGuard guard;
};

// The number of the task, among those of its stream.
uint64_t enqueue(c10::Stream stream, Task task);
uint64_t last_task(c10::Stream stream);
bool is_done(c10::Stream stream, uint64_t task);
void run_until(c10::Stream stream, uint64_t task);
void run_all(c10::DeviceIndex device);

// Memory of the device. It is filled with ones in all bits, which is no number, when it is lent.
void record_stream(void* context, c10::Stream stream);
void set_limit(int64_t nbytes);
int64_t pending_tasks();

bool is_pinned(const void* data);
void note_pinned_use(const void* data, c10::Stream stream, uint64_t task);

// A seed for the next random operator on the device, which moves the state on.
uint64_t draw_seed(const c10::DeviceIndex device, void* generator, int64_t count);

} // namespace late
