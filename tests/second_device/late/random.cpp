// Random generators of the device: a seed and an offset, as those of CUDA, and PyTorch's hooks.
#include "late.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/StorageImpl.h>

#include <cstring>

namespace late {

c10::Allocator* pinned_allocator();

namespace {

constexpr int64_t kStateBytes = 2 * sizeof(uint64_t);

struct Random final : c10::GeneratorImpl {
  explicit Random(c10::DeviceIndex device)
      : GeneratorImpl(
            c10::Device(kLate, device),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t wanted) override {
    seed_ = wanted;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == kStateBytes && state.device_type() == c10::DeviceType::CPU,
        "the state of a generator on 'late' is ", kStateBytes, " bytes on the CPU");
    auto* data = static_cast<const char*>(state.data());
    std::memcpy(&seed_, data, sizeof(seed_));
    std::memcpy(&offset_, data + sizeof(seed_), sizeof(offset_));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({kStateBytes}, at::kByte); // in a trace, too
    auto* data = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(data, &seed_, sizeof(seed_));
    std::memcpy(data + sizeof(seed_), &offset_, sizeof(offset_));
    return state.getIntrusivePtr();
  }
  Random* clone_impl() const override {
    auto* copy = new Random(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

at::Generator& default_generator(c10::DeviceIndex device) {
  static at::Generator generators[kDevices] = {
      at::make_generator<Random>(c10::DeviceIndex(0)),
      at::make_generator<Random>(c10::DeviceIndex(1))};
  return generators[device < 0 ? current_device() : device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Random>(device < 0 ? current_device() : device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return c10::Device(kLate, current_device());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto* allocator = c10::GetAllocator(kLate);
    auto data = allocator->allocate(nbytes);
    auto count = std::min(nbytes, impl->nbytes());
    if (count > 0) {
      void* to = data.get();
      const void* from = impl->data();
      enqueue(current_stream(storage.device().index()), [=] { std::memcpy(to, from, count); });
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

const bool is_registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

} // namespace

uint64_t draw_seed(const c10::DeviceIndex device, void* generator, int64_t count) {
  auto* from = generator == nullptr
      ? static_cast<Random*>(default_generator(device).unsafeGetGeneratorImpl())
      : static_cast<Random*>(generator);
  TORCH_CHECK(
      from->device().type() == kLate && from->device().index() == device,
      "a generator on late:", int(device), " is expected, not one on ", from->device());
  auto drawn = mix(from->seed_ + mix(from->offset_));
  from->offset_ += uint64_t((count + 3) / 4 * 4);
  return drawn;
}

} // namespace late
