// An accelerator made of threads, for tests: torch's PrivateUse1 device, called "sim", with four devices.
//
// A stream is a thread with a queue. What CUDA may do to a program that forgets to wait, this does: copies come late,
// memory goes back to the pool of the stream that it was allocated on as soon as the host lets go of it, and is
// overwritten there in the stream's order, unless record_stream named other streams that still use it.
//
// Copies and fills are asynchronous. All other operators are the CPU's (torch's fallback), and wait for their operands
// on the current stream: a computation that lags is made with sim::busy and a copy.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
using Lock = std::lock_guard<std::mutex>;
using Clock = std::chrono::steady_clock;

// What tests set and count. Objects below are never destroyed: threads of streams run until the process ends.
std::atomic<bool> started{false};
std::atomic<int64_t> late_us{0}, fails_in{-1}, limit{INT64_MAX}, num_copies{0}, num_recorded{0};

// As CUDA's errors do, one sticks: whatever the host asks of the device raises from then on.
std::atomic<bool> has_failed{false};
void check() { TORCH_CHECK(!has_failed, "sim: a copy has failed"); }

// -- streams and events -----------------------------------------------------------------------------------------------

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point at;

  void set() {
    Lock lock(mutex);
    done = true, at = Clock::now();
    changed.notify_all();
  }
  void wait() {  // a stream waits
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
  void synchronize() {  // the host waits, and hears of errors
    wait();
    check();
  }
  bool query() {
    Lock lock(mutex);
    return done;
  }
};
using EventPtr = std::shared_ptr<Event>;

struct Queue {
  std::mutex mutex;
  std::condition_variable filled;
  std::deque<std::function<void()>> work;

  Queue() {
    started = true;
    std::thread([this] { run(); }).detach();
  }
  void run() {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> lock(mutex);
        filled.wait(lock, [&] { return !work.empty(); });
        next = std::move(work.front());
        work.pop_front();
      }
      try {
        next();
      } catch (const std::exception&) {
        has_failed = true;
      }
    }
  }
  void push(std::function<void()> task) {
    Lock lock(mutex);
    work.push_back(std::move(task));
    filled.notify_one();
  }
  EventPtr mark() {
    auto event = std::make_shared<Event>();
    push([event] { event->set(); });
    return event;
  }
};

auto& queues_mutex = *new std::mutex;
auto& queues = *new std::map<std::pair<int, c10::StreamId>, Queue*>;
c10::StreamId last_stream = 0;
thread_local int device = 0;
thread_local c10::StreamId streams[kDevices] = {};

Queue& queue(int of, c10::StreamId stream) {
  Lock lock(queues_mutex);
  auto*& found = queues[{of, stream}];
  return *(found ? found : found = new Queue);
}
Queue& queue(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }
Queue& current() { return queue(device, streams[device]); }

// -- memory of the device ----------------------------------------------------------------------------------------------

struct Block {
  void* data;
  size_t size;
  int device;
  c10::StreamId stream;
  std::set<c10::StreamId> users;  // other streams
};

auto& blocks_mutex = *new std::mutex;
auto& pool = *new std::map<std::tuple<int, c10::StreamId, size_t>, std::vector<Block*>>;
auto& live = *new std::map<void*, Block*>;
int64_t allocated[kDevices] = {};

void give_back(Block* block) {  // its stream's next user may write there, after all that the stream has to do yet
  queue(block->device, block->stream).push([block] { memset(block->data, 0xff, block->size); });
  Lock lock(blocks_mutex);
  pool[{block->device, block->stream, block->size}].push_back(block);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t asked) override {
    size_t size = (std::max<size_t>(asked, 1) + 511) / 512 * 512;
    Lock lock(blocks_mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, allocated[device] + int64_t(size) <= limit, "sim: out of memory");
    auto& free = pool[{device, streams[device], size}];
    Block* block = nullptr;
    if (free.empty()) {
      block = new Block{nullptr, size, device, streams[device], {}};
      TORCH_CHECK(!posix_memalign(&block->data, 512, size), "sim: no memory on the host");
      memset(block->data, 0xff, size);
    } else {
      block = free.back();
      free.pop_back();
    }
    live[block->data] = block;
    allocated[device] += int64_t(size);
    return {block->data, block, &DeviceAllocator::release, c10::Device(kSim, device)};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    {
      Lock lock(blocks_mutex);
      live.erase(block->data);
      allocated[block->device] -= int64_t(block->size);
    }
    auto users = std::exchange(block->users, {});
    if (users.empty()) return give_back(block);
    auto left = std::make_shared<std::atomic<size_t>>(users.size());
    for (auto stream : users)
      queue(block->device, stream).push([block, left] { if (--*left == 0) give_back(block); });
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(blocks_mutex);
    auto found = live.find(data.get_context() ? static_cast<Block*>(data.get_context())->data : nullptr);
    if (found == live.end() || stream.id() == found->second->stream) return;
    found->second->users.insert(stream.id());
    num_recorded++;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &DeviceAllocator::release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
auto& device_allocator = *new DeviceAllocator;

// -- page-locked memory of the host: not used again before the copies that torch knows of ------------------------------

struct Pinned {
  char* data;
  size_t size;
  std::vector<EventPtr> copies;
};
auto& pinned_mutex = *new std::mutex;
auto& pinned = *new std::map<char*, Pinned*>;
auto& released = *new std::vector<Pinned*>;

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t asked) override {
    Lock lock(pinned_mutex);
    std::erase_if(released, [](Pinned* block) {
      for (auto& copy : block->copies)
        if (!copy->query()) return false;
      pinned.erase(block->data);
      memset(block->data, 0xee, block->size);
      free(block->data);
      delete block;
      return true;
    });
    void* data = nullptr;
    size_t size = std::max<size_t>(asked, 64);
    TORCH_CHECK(!posix_memalign(&data, 4096, size), "sim: no memory on the host");
    auto* block = pinned[static_cast<char*>(data)] = new Pinned{static_cast<char*>(data), size, {}};
    return {data, block, &HostAllocator::release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* context) {  // never waits: a stream's own thread may call it
    Lock lock(pinned_mutex);
    released.push_back(static_cast<Pinned*>(context));
  }
  static Pinned* find(const void* at) {  // with the mutex held
    auto* place = static_cast<char*>(const_cast<void*>(at));
    auto next = pinned.upper_bound(place);
    if (next == pinned.begin()) return nullptr;
    auto* block = std::prev(next)->second;
    return place < block->data + block->size ? block : nullptr;
  }
  static bool holds(const void* at) {
    Lock lock(pinned_mutex);
    return find(at) != nullptr;
  }
  bool record_event(void* data, void*, c10::Stream stream) override {
    auto event = queue(stream).mark();
    Lock lock(pinned_mutex);
    auto* block = find(data);
    if (block) block->copies.push_back(event);
    return block != nullptr;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &HostAllocator::release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
auto& host_allocator = *new HostAllocator;

// -- what torch asks of a device ---------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return c10::DeviceIndex(std::exchange(device, index < 0 ? device : index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return HostAllocator::holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kSim, c10::DeviceIndex(device)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = device_allocator.allocate(size);
    current().mark()->synchronize();
    memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    auto& changed = const_cast<c10::Storage&>(storage);
    changed.set_data_ptr_noswap(std::move(data));
    changed.set_nbytes(size);
  }
};
auto& hooks = *new Hooks;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device of) { return of.index() < 0 ? device : of.index(); }
  static c10::Stream stream(int of, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, c10::DeviceIndex(of)), id);
  }
  static EventPtr& event(void* given) { return *static_cast<EventPtr*>(given); }

  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return c10::Device(kSim, c10::DeviceIndex(device)); }
  void setDevice(c10::Device to) const override { device = index(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { device = index(to); }
  c10::Device exchangeDevice(c10::Device to) const override {
    return c10::Device(kSim, c10::DeviceIndex(std::exchange(device, index(to))));
  }
  c10::Stream getStream(c10::Device of) const override { return stream(index(of), streams[index(of)]); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(index(of), 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    Lock lock(queues_mutex);
    return stream(index(of), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(to.device_index(), std::exchange(streams[to.device_index()], to.id()));
  }
  bool queryStream(const c10::Stream& of) const override { return queue(of).mark()->query(); }
  void synchronizeStream(const c10::Stream& of) const override { queue(of).mark()->synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex of) const override {
    std::vector<EventPtr> events;
    {
      Lock lock(queues_mutex);
      for (auto& [key, found] : queues)
        if (key.first == of) events.push_back(found->mark());
    }
    for (auto& each : events) each->synchronize();
  }
  void record(void** given, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*given) *given = new EventPtr;
    event(*given) = queue(on).mark();
  }
  void block(void* given, const c10::Stream& on) const override {
    if (given) queue(on).push([waited = event(given)] { waited->wait(); });
  }
  bool queryEvent(void* given) const override { return !given || event(given)->query(); }
  void synchronizeEvent(void* given) const override {
    if (given) EventPtr(event(given))->synchronize();
  }
  void destroyEvent(void* given, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(given);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event(to)->at - event(from)->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    device_allocator.recordStream(data, on);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- operators ---------------------------------------------------------------------------------------------------------

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Where = std::optional<c10::Device>;
using Flag = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;
using Sizes = c10::SymIntArrayRef;

at::Tensor empty(c10::IntArrayRef sizes, Dtype dtype, Layout, Where where, Flag, Format format) {
  c10::OptionalDeviceGuard guard(where);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &device_allocator, keys, dtype.value_or(at::kFloat), format);
}
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, Dtype dtype, Layout, Where where, Flag) {
  c10::OptionalDeviceGuard guard(where);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, keys, dtype.value_or(at::kFloat));
}

// A CPU tensor on the same memory, which it does not own: as on a GPU, it may be freed before it is used.
at::Tensor on_host(const at::Tensor& x) {
  auto options = at::TensorOptions().dtype(x.dtype()).device(at::kCPU);
  auto host =
      at::for_blob(x.data_ptr(), x.sizes()).strides(x.strides()).options(options).target_device(at::kCPU).make_tensor();
  host._set_conj(x.is_conj());
  host._set_neg(x.is_neg());
  return host;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  check();
  if (!to.numel()) return to;
  bool from_sim = from.device().type() == kSim, to_sim = to.device().type() == kSim;
  c10::DeviceGuard guard(to_sim ? to.device() : from.device());
  if (from_sim && to_sim && from.device() != to.device())  // as CUDA does: both devices' streams are in order with it
    queue(from.device().index(), streams[from.device().index()]).mark()->synchronize();
  const at::Tensor& host = from_sim ? to : from;
  bool is_pinned = from_sim != to_sim && HostAllocator::holds(host.data_ptr());
  at::Tensor source = from_sim ? on_host(from) : from, target = to_sim ? on_host(to) : to;
  bool waits = from_sim != to_sim && !(is_pinned && non_blocking);
  if (!from_sim && is_pinned && non_blocking) source = on_host(from);  // the allocator below keeps it
  if (!from_sim && !is_pinned) source = from.clone();                  // pageable memory is taken before this returns
  int64_t late = non_blocking ? late_us.load() : 0;
  bool fails = fails_in >= 0 && fails_in-- == 0;
  num_copies++;
  current().push([source, target, late, fails]() mutable {
    if (late) std::this_thread::sleep_for(std::chrono::microseconds(late));
    TORCH_CHECK(!fails);
    at::NoGradGuard no_grad;
    target.copy_(source);
  });
  if (is_pinned && non_blocking)
    host_allocator.record_event(host.data_ptr(), nullptr, Guard().getStream(guard.current_device()));
  if (waits && !(to_sim && non_blocking)) current().mark()->synchronize();
  return to;
}
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor as_strided(const at::Tensor& x, Sizes sizes, Sizes strides, std::optional<c10::SymInt> offset) {
  auto at = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), at);
}
at::Tensor view(const at::Tensor& x, Sizes sizes) { return at::native::view(x, C10_AS_INTARRAYREF_SLOW(sizes)); }
at::Tensor alias(const at::Tensor& x, Sizes sizes, Sizes strides) {
  return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
const at::Tensor& resize(const at::Tensor& x, Sizes sizes, Format format) {
  return at::native::resize_(x, C10_AS_INTARRAYREF_SLOW(sizes), format);
}
at::Tensor& set_storage(at::Tensor& x, at::Storage storage, c10::SymInt offset, Sizes sizes, Sizes strides) {
  auto at = offset.guard_int(__FILE__, __LINE__);
  return at::native::set_storage_cpu_(
      x, storage, at, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
at::Tensor& set_whole_storage(at::Tensor& x, at::Storage storage) {
  auto num = int64_t(storage.nbytes() / x.itemsize());
  return at::native::set_storage_cpu_(x, storage, 0, {num}, {});
}
at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) {
  return at::native::set_storage_cpu_(x, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Scalar item(const at::Tensor& x) {
  queue(Guard().getStream(x.device())).mark()->synchronize();
  return at::native::_local_scalar_dense_cpu(on_host(x));
}
void record_stream(at::Tensor& x, c10::Stream stream) {
  device_allocator.recordStream(x.storage().data_ptr(), stream);
}

// Those that torch has every device implement itself.
at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, Sizes stride, Sizes padding,
    Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  auto host_bias = bias && bias->defined() ? std::optional<at::Tensor>(bias->cpu()) : std::nullopt;
  auto found = at::convolution_symint(
      x.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding, groups);
  return found.to(x.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, Sizes stride, Sizes padding, Sizes dilation,
    bool transposed, Sizes output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  std::vector<c10::SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto [a, b, c] = at::convolution_backward_symint(
      grad.cpu(), x.cpu(), weight.cpu(), c10::SymIntArrayRef(bias), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  auto back = [&](const at::Tensor& found) { return found.defined() ? found.to(x.device()) : found; };
  return {back(a), back(b), back(c)};
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_and_resize));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

// -- what tests ask ----------------------------------------------------------------------------------------------------

void busy(int64_t microseconds) {
  current().push([microseconds] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}
TORCH_LIBRARY(sim, m) {
  m.def("busy(int microseconds) -> ()", busy);
  m.def("late(int microseconds) -> ()", [](int64_t us) { late_us = us; });
  m.def("limit(int bytes) -> ()", [](int64_t bytes) { limit = bytes; });
  m.def("fail_copy(int after) -> ()", [](int64_t after) { fails_in = after, has_failed = false; });
  m.def("allocated(int device) -> int", [](int64_t of) { Lock lock(blocks_mutex); return allocated[of]; });
  m.def("pinned() -> int", [] { Lock lock(pinned_mutex); return int64_t(pinned.size()); });
  m.def("started() -> bool", [] { return started.load(); });
  m.def("counts() -> int[]", [] { return std::vector<int64_t>{num_copies, num_recorded}; });
}

struct Start {
  Start() {
    c10::SetAllocator(kSim, &device_allocator, 100);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    at::setHostAllocator(at::DeviceType::PrivateUse1, &host_allocator, 100);
  }
} start;

}  // namespace
