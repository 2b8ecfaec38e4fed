// The C ABI: NULL for every pointer of every function, options of init, and want of memory.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "bindings/c/farandole.h"
#include "test/support/count_allocations.h"

namespace {

using ::testing::HasSubstr;

// How many threads can still be started; negative: as many as the system has.
std::atomic<int> threads_left{-1};

/// One rank in this process, with one of each handle.
class CAbi : public ::testing::Test {
 protected:
  CAbi() {
    EXPECT_EQ(farandole_init_in_process(1, &context), FARANDOLE_OK);
    params.struct_size = sizeof params;
    params.kind = FARANDOLE_ALLREDUCE;
    params.op = FARANDOLE_SUM;
    params.prescale = params.postscale = 1;
    params.root = -1;
    rows_params = params;
    rows_params.kind = FARANDOLE_ALLGATHER;
    operation = Prepare(params, "t");
    gathering = Prepare(rows_params, "rows");
    EXPECT_EQ(farandole_start(operation, 0, &in, &out, nullptr, nullptr, &work), FARANDOLE_OK);
    EXPECT_EQ(farandole_wait(work, -1), FARANDOLE_OK);
    EXPECT_EQ(farandole_gradients_create(context, &params, nullptr, &tensor, 1, &gradients),
              FARANDOLE_OK);
  }
  ~CAbi() override {
    farandole_gradients_release(gradients);
    farandole_work_release(work);
    farandole_release(context);
  }

  farandole_operation* Prepare(const farandole_params& what, const char* name) {
    farandole_operation* made = nullptr;
    EXPECT_EQ(farandole_prepare(context, &what, name, &tensor, 1, &made, nullptr), FARANDOLE_OK);
    return made;
  }

  const int64_t count = 4;
  farandole_tensor tensor = {nullptr, FARANDOLE_FLOAT32, 1, &count};
  farandole_params params{}, rows_params{};
  float data[4] = {1, 2, 3, 4};
  const void* in = data;
  void* out = data;
  const void* no_in = nullptr;
  void* no_out = nullptr;
  const int32_t ranks[1] = {0};
  farandole_context* context = nullptr;
  farandole_operation* operation = nullptr;
  farandole_operation* gathering = nullptr;
  farandole_work* work = nullptr;
  farandole_gradients* gradients = nullptr;

  // Where a call without the NULL would put its results.
  farandole_context* a_context = nullptr;
  farandole_operation* an_operation = nullptr;
  farandole_work* a_work = nullptr;
  farandole_gradients* a_gradients = nullptr;
  farandole_buffer* a_buffer = nullptr;
  int64_t number = 0;
  int32_t rank = 0;
  uint32_t uid = 0;
  const char* text = nullptr;
};

/// `call` passes NULL for `pointer` and good values for all else.
struct Null {
  std::string function;  ///< Without "farandole_".
  std::string pointer;   ///< Is in the error message.
  std::function<int()> call;
};

std::set<std::string> ExportedFunctions() {
  const std::string prefix = "farandole_";
  std::set<std::string> names;
  std::ifstream file(FARANDOLE_TEST_SYMBOLS);
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find('@');
    if (line.starts_with(prefix) && at != std::string::npos) {
      names.insert(line.substr(prefix.size(), at - prefix.size()));
    }
  }
  return names;
}

// A row for each pointer that must not be NULL. Functions that give no error code, and pointers
// that may be NULL, are below.
TEST_F(CAbi, RefusesNullByTheNameOfThePointer) {
  const auto prepare = [&](auto* c, auto* p, auto* t, auto** o) {
    return farandole_prepare(c, p, "n", t, 1, o, nullptr);
  };
  const auto create = [&](auto* c, auto* p, auto* t, auto** o) {
    return farandole_gradients_create(c, p, nullptr, t, 1, o);
  };
  int32_t due = 0;
  farandole_round_status status{};
  status.struct_size = sizeof status;
  float results[4] = {};
  const farandole_output no_place = {nullptr, sizeof results, nullptr};
  farandole_context* const no_context = nullptr;
  farandole_context** const no_contexts = nullptr;
  farandole_operation* const no_operation = nullptr;
  farandole_operation** const no_operations = nullptr;
  farandole_work* const no_work = nullptr;
  farandole_work** const no_works = nullptr;
  farandole_gradients* const none = nullptr;
  farandole_gradients** const no_gradients = nullptr;
  const farandole_params* const no_params = nullptr;
  const farandole_tensor* const no_tensor = nullptr;
  farandole_stream stream{};
  stream.struct_size = sizeof stream;
  farandole_allocator allocator{};
  allocator.struct_size = sizeof allocator;
  farandole_tensor no_shape = tensor;
  no_shape.shape = nullptr;
  using R = farandole_request;
  const R request = {sizeof(R), 0,       0,       &in,     &out,   nullptr,
                     nullptr,   nullptr, nullptr, nullptr, nullptr};
  const auto With = [&](auto R::*field, auto value) {
    R changed = request;
    changed.*field = value;
    return changed;
  };
  const auto start = [&](farandole_operation* started, const R& given) {
    return farandole_start_request(started, &given, &a_work);
  };
  const std::vector<Null> rows = {
      {"last_failure", "out", [&] { return farandole_last_failure(nullptr); }},
      {"init", "out", [&] { return farandole_init(nullptr, no_contexts); }},
      {"init_for", "context", [&] { return farandole_init_for(nullptr, 0, no_contexts); }},
      {"init_in_process", "out", [&] { return farandole_init_in_process(1, no_contexts); }},
      {"shutdown", "context", [&] { return farandole_shutdown(no_context); }},
      {"shutdown_for", "context", [&] { return farandole_shutdown_for(no_context, 0); }},
      {"leave_at_exit", "context",
       [&] { return farandole_leave_at_exit(no_context, 0, nullptr, 0); }},
      {"get_topology", "context",
       [&] {
         farandole_topology topology;
         return farandole_get_topology(nullptr, &topology);
       }},
      {"check", "context", [&] { return farandole_check(no_context); }},
      {"when_finished", "work",
       [&] {
         return farandole_when_finished(
             no_work, [](void*, int) {}, nullptr);
       }},
      {"when_finished", "call", [&] { return farandole_when_finished(work, nullptr, nullptr); }},
      {"get_topology", "out", [&] { return farandole_get_topology(context, nullptr); }},
      {"prepare", "context", [&] { return prepare(no_context, &params, &tensor, &an_operation); }},
      {"prepare", "params", [&] { return prepare(context, no_params, &tensor, &an_operation); }},
      {"prepare", "tensors", [&] { return prepare(context, &params, no_tensor, &an_operation); }},
      {"prepare", "shape", [&] { return prepare(context, &params, &no_shape, &an_operation); }},
      {"prepare", "out", [&] { return prepare(context, &params, &tensor, no_operations); }},
      {"start_request", "operation", [&] { return start(no_operation, request); }},
      {"start_request", "request",
       [&] { return farandole_start_request(operation, nullptr, &a_work); }},
      {"start_request", "in", [&] { return start(operation, With(&R::in, nullptr)); }},
      {"start_request", "out", [&] { return start(operation, With(&R::out, nullptr)); }},
      {"start_request", "no input", [&] { return start(operation, With(&R::in, &no_in)); }},
      {"start_request", "no output", [&] { return start(operation, With(&R::out, &no_out)); }},
      {"start_request", "work",
       [&] { return farandole_start_request(operation, &request, no_works); }},
      {"start_request", "in",
       [&] {
         return farandole_start_allocating(gathering, 0, nullptr, nullptr, nullptr, &a_work);
       }},
      {"start_request", "no input",
       [&] { return farandole_start_allocating(gathering, 0, &no_in, nullptr, nullptr, &a_work); }},
      {"start_request", "allocate",
       [&] { return farandole_start_allocating(gathering, 0, &in, &allocator, nullptr, &a_work); }},
      {"start_request", "out",
       [&] { return farandole_start_into(gathering, 0, &in, nullptr, nullptr, &a_work); }},
      {"start_request", "no address",
       [&] { return farandole_start_into(gathering, 0, &in, &no_place, nullptr, &a_work); }},
      {"run_request", "operation",
       [&] { return farandole_run(no_operation, 0, &in, &out, -1, &a_work); }},
      {"run_request", "request",
       [&] { return farandole_run_request(operation, nullptr, -1, &a_work); }},
      {"run_request", "in",
       [&] { return farandole_run(operation, 0, nullptr, &out, -1, &a_work); }},
      {"run_request", "out",
       [&] { return farandole_run(operation, 0, &in, nullptr, -1, &a_work); }},
      {"run_request", "no output",
       [&] { return farandole_run(operation, 0, &in, &no_out, -1, &a_work); }},
      {"run_request", "no address",
       [&] { return farandole_run_into(operation, 0, &in, &no_place, -1, &a_work); }},
      {"run_request", "work", [&] { return farandole_run(operation, 0, &in, &out, -1, no_works); }},
      {"output_rows", "context",
       [&] { return farandole_output_rows(nullptr, FARANDOLE_ALLGATHER, 0, 1, &number); }},
      {"output_rows", "out",
       [&] { return farandole_output_rows(context, FARANDOLE_ALLGATHER, 0, 1, nullptr); }},
      {"received_rows", "work", [&] { return farandole_received_rows(no_work, 0, &number, 1); }},
      {"received_rows", "rows", [&] { return farandole_received_rows(work, 0, nullptr, 1); }},
      {"take_result", "work", [&] { return farandole_take_result(no_work, 0, &a_buffer); }},
      {"take_result", "result", [&] { return farandole_take_result(work, 0, nullptr); }},
      {"buffer_allocate", "context",
       [&] { return farandole_buffer_allocate(no_context, 1, &a_buffer); }},
      {"buffer_allocate", "out", [&] { return farandole_buffer_allocate(context, 1, nullptr); }},
      {"wait_on", "work", [&] { return farandole_wait_on(no_work, &stream, 0); }},
      {"wait_on", "stream", [&] { return farandole_wait_on(work, nullptr, 0); }},
      {"is_complete", "work", [&] { return farandole_is_complete(no_work); }},
      {"wait", "work", [&] { return farandole_wait(no_work, 0); }},
      {"join", "context", [&] { return farandole_join(no_context, 0, &rank); }},
      {"join", "last_rank", [&] { return farandole_join(context, 0, nullptr); }},
      {"set_add", "context", [&] { return farandole_set_add(no_context, ranks, 1, &a_work); }},
      {"set_add", "pointer", [&] { return farandole_set_add(context, nullptr, 1, &a_work); }},
      {"set_add", "work", [&] { return farandole_set_add(context, ranks, 1, no_works); }},
      {"set_find", "context", [&] { return farandole_set_find(no_context, ranks, 1, &uid); }},
      {"set_find", "pointer", [&] { return farandole_set_find(context, nullptr, 1, &uid); }},
      {"set_find", "uid", [&] { return farandole_set_find(context, ranks, 1, nullptr); }},
      {"set_remove", "context", [&] { return farandole_set_remove(no_context, 1, &a_work); }},
      {"set_remove", "work", [&] { return farandole_set_remove(context, 1, no_works); }},
      {"gradients_create", "context",
       [&] { return create(no_context, &params, &tensor, &a_gradients); }},
      {"gradients_create", "params",
       [&] { return create(context, no_params, &tensor, &a_gradients); }},
      {"gradients_create", "tensors",
       [&] { return create(context, &params, no_tensor, &a_gradients); }},
      {"gradients_create", "shape",
       [&] { return create(context, &params, &no_shape, &a_gradients); }},
      {"gradients_create", "out", [&] { return create(context, &params, &tensor, no_gradients); }},
      {"gradients_redefine", "gradients",
       [&] { return farandole_gradients_redefine(none, &tensor, 1, FARANDOLE_CPU); }},
      {"gradients_redefine", "tensors",
       [&] { return farandole_gradients_redefine(gradients, nullptr, 1, FARANDOLE_CPU); }},
      {"gradients_redefine", "shape",
       [&] { return farandole_gradients_redefine(gradients, &no_shape, 1, FARANDOLE_CPU); }},
      {"gradients_add", "gradients", [&] { return farandole_gradients_add(none, &tensor, 1); }},
      {"gradients_add", "tensors", [&] { return farandole_gradients_add(gradients, nullptr, 1); }},
      {"gradients_rebind", "gradients",
       [&] { return farandole_gradients_rebind(none, context, 0, nullptr, 0); }},
      {"gradients_set_passes", "gradients",
       [&] { return farandole_gradients_set_passes(none, 1); }},
      {"gradients_note_failure", "gradients",
       [&] { return farandole_gradients_note_failure(none, nullptr); }},
      {"gradients_forget", "gradients", [&] { return farandole_gradients_forget(none); }},
      {"gradients_complete", "gradients",
       [&] { return farandole_gradients_complete(none, nullptr); }},
      {"gradients_complete", "rounds",
       [&] { return farandole_gradients_complete(gradients, nullptr); }},
      {"gradients_count_pass", "gradients",
       [&] { return farandole_gradients_count_pass(none, 0); }},
      {"gradients_open", "gradients", [&] { return farandole_gradients_open(none); }},
      {"gradients_accumulated", "gradients",
       [&] { return farandole_gradients_accumulated(none, 0, &due); }},
      {"gradients_accumulated", "due",
       [&] { return farandole_gradients_accumulated(gradients, 0, nullptr); }},
      {"gradients_mark", "gradients",
       [&] { return farandole_gradients_mark(none, 0, data, data, FARANDOLE_PRESENT, nullptr); }},
      {"gradients_raise_flag", "gradients", [&] { return farandole_gradients_raise_flag(none); }},
      {"gradients_compare", "gradients", [&] { return farandole_gradients_compare(none, 0); }},
      {"gradients_end", "gradients", [&] { return farandole_gradients_end(none, nullptr); }},
      {"gradients_wait", "gradients", [&] { return farandole_gradients_wait(none, nullptr, 0); }},
      {"gradients_stepped", "gradients", [&] { return farandole_gradients_stepped(none); }},
      {"gradients_status", "gradients", [&] { return farandole_gradients_status(none, &status); }},
      {"gradients_status", "status",
       [&] { return farandole_gradients_status(gradients, nullptr); }},
      {"gradients_take_result", "gradients",
       [&] { return farandole_gradients_take_result(none, 0, &a_buffer); }},
      {"gradients_take_result", "result",
       [&] { return farandole_gradients_take_result(gradients, 0, nullptr); }},
      {"timeline_start", "context", [&] { return farandole_timeline_start(no_context, "p", 0); }},
      {"timeline_start", "path", [&] { return farandole_timeline_start(context, nullptr, 0); }},
      {"timeline_stop", "context", [&] { return farandole_timeline_stop(no_context); }},
      {"get_setting", "context",
       [&] { return farandole_get_setting(no_context, "FARANDOLE_WINDOW", &text); }},
      {"get_setting", "name", [&] { return farandole_get_setting(context, nullptr, &text); }},
      {"get_setting", "value",
       [&] { return farandole_get_setting(context, "FARANDOLE_WINDOW", nullptr); }},
  };
  // Without an error code, or without a pointer.
  std::set<std::string> covered = {
      "version",        "abi_version",       "last_error",       "release",
      "buffer_data",    "buffer_bytes",      "buffer_release",   "poll",
      "skipped",        "work_release",      "gradients_marked", "gradients_skipped",
      "counters",       "gradients_release", "gradients_next",   "operation_release",
      "wait_in_slices", "describe_with",
  };
  for (const Null& row : rows) {
    SCOPED_TRACE("farandole_" + row.function + ", " + row.pointer + " NULL");
    EXPECT_EQ(row.call(), FARANDOLE_INVALID_ARGUMENT);
    EXPECT_THAT(farandole_last_error(), HasSubstr(row.pointer));
    covered.insert(row.function);
  }
  EXPECT_EQ(covered, ExportedFunctions());
  // The operation is as it was.
  EXPECT_EQ(farandole_run(operation, 0, &in, &out, -1, &a_work), FARANDOLE_OK);
}

TEST_F(CAbi, AsksNothingOfANullHandle) {
  farandole_release(nullptr);
  farandole_work_release(nullptr);
  farandole_operation_release(nullptr);
  farandole_buffer_release(nullptr);
  farandole_gradients_release(nullptr);
  EXPECT_EQ(farandole_buffer_data(nullptr), nullptr);
  EXPECT_EQ(farandole_buffer_bytes(nullptr), 0);
  EXPECT_EQ(farandole_poll(nullptr), 0);
  EXPECT_EQ(farandole_skipped(nullptr, 0), 0);
  EXPECT_EQ(farandole_gradients_marked(nullptr, 0), 0);
  EXPECT_EQ(farandole_gradients_skipped(nullptr, 0), 0);
  EXPECT_EQ(farandole_gradients_next(nullptr), -1);
  EXPECT_EQ(farandole_counters(nullptr, nullptr, nullptr, 0), 0);
}

TEST_F(CAbi, GivesCountersIntoTheArraysThatThereAre) {
  const int32_t all = farandole_counters(context, nullptr, nullptr, 0);
  std::vector<const char*> names(static_cast<size_t>(all));
  std::vector<int64_t> values(static_cast<size_t>(all), -1);
  EXPECT_EQ(farandole_counters(context, nullptr, nullptr, all), all);
  EXPECT_EQ(farandole_counters(context, names.data(), nullptr, all), all);
  EXPECT_EQ(farandole_counters(context, nullptr, values.data(), all), all);
  EXPECT_STRNE(names.back(), nullptr);
  EXPECT_GE(values.back(), 0);
}

TEST_F(CAbi, AbsentTensorsNeedNoMemory) {
  const uint8_t absent = FARANDOLE_ABSENT;
  EXPECT_EQ(farandole_start(operation, 0, &no_in, &no_out, &absent, nullptr, &a_work),
            FARANDOLE_OK);
  EXPECT_EQ(farandole_wait(a_work, -1), FARANDOLE_OK);
  EXPECT_EQ(farandole_skipped(a_work, 0), 1);
  farandole_work_release(a_work);
}

TEST_F(CAbi, WritesResultsIntoMemoryWhoseSizeIsGiven) {
  float results[4] = {};
  const int64_t rows = 4;
  const farandole_output place = {results, sizeof results, &rows};
  ASSERT_EQ(farandole_start_into(gathering, 0, &in, &place, nullptr, &a_work), FARANDOLE_OK);
  EXPECT_EQ(farandole_wait(a_work, -1), FARANDOLE_OK);
  EXPECT_THAT(results, testing::ElementsAre(1, 2, 3, 4));
  int64_t received = 0;
  EXPECT_EQ(farandole_received_rows(a_work, 0, &received, 1), FARANDOLE_OK);
  EXPECT_EQ(received, 4);
  farandole_work_release(a_work);
  float sums[4] = {};
  const farandole_output sum = {sums, sizeof sums, nullptr};
  EXPECT_EQ(farandole_run_into(operation, 0, &in, &sum, -1, &a_work), FARANDOLE_OK);
  EXPECT_THAT(sums, testing::ElementsAre(1, 2, 3, 4));
}

// The memory behind the output is poisoned where the address sanitizer builds this.
TEST_F(CAbi, WritesNothingWhereMoreOrFewerRowsComeThanAnOutputIsFor) {
  for (const int64_t floats : {0, 3, 5}) {
    std::vector<float> results(static_cast<size_t>(floats), -1);
    const farandole_output place = {results.data(), floats * 4, nullptr};
    EXPECT_EQ(farandole_run_into(gathering, 0, &in, &place, -1, &a_work), FARANDOLE_MISMATCH);
    EXPECT_THAT(farandole_last_error(),
                HasSubstr("is of shape [" + std::to_string(floats) +
                          "]; rows [4] came from the ranks, which are of shape [4]"));
    EXPECT_THAT(results, testing::Each(-1));
  }
}

TEST_F(CAbi, RefusesOutputsThatCannotHoldTheResult) {
  float results[5] = {};
  const int64_t five = 5, negative = -4;
  const struct {
    farandole_operation* started;
    farandole_output out;
    const char* error;
  } cases[] = {
      {gathering, {results, 15, nullptr}, "15 bytes; expected a multiple of the 4 of a row"},
      {gathering, {results, -4, nullptr}, "-4 bytes"},
      {gathering, {results, 16, &five}, "16 bytes; expected the 20 of the rows [5]"},
      {gathering, {results, 16, &negative}, "-4"},
      {gathering, {data + 1, 12, nullptr}, "in the memory of its input"},
      {gathering, {data, 16, nullptr}, "in the memory of its input"},
      {operation, {results, 20, nullptr}, "20 bytes; expected the 16 of the result"},
      {operation, {results, 12, nullptr}, "12 bytes; expected the 16 of the result"},
      {operation, {results, 16, &count}, "expected NULL"},
      {operation, {data + 1, 16, nullptr}, "in the memory of its input"},
  };
  for (const auto& one : cases) {
    EXPECT_EQ(farandole_run_into(one.started, 0, &in, &one.out, -1, &a_work),
              FARANDOLE_INVALID_ARGUMENT);
    EXPECT_THAT(farandole_last_error(), HasSubstr(one.error));
  }
  const farandole_output in_place = {data, sizeof data, nullptr};
  EXPECT_EQ(farandole_run_into(operation, 0, &in, &in_place, -1, &a_work), FARANDOLE_OK);
}

TEST_F(CAbi, RefusesRequestsWhoseResultsGoToSeveralPlacesOrWouldBeLost) {
  farandole_request twice{}, kept{};
  twice.struct_size = kept.struct_size = sizeof kept;
  twice.in_library = kept.in_library = 1;
  twice.in = kept.in = &in;
  twice.out = &out;
  EXPECT_EQ(farandole_start_request(gathering, &twice, &a_work), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("its results go to 2 places"));
  EXPECT_EQ(farandole_run_request(gathering, &kept, -1, &a_work), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("expected farandole_start_request"));
  EXPECT_EQ(farandole_start_request(operation, &kept, &a_work), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("its results have a size that is known"));
}

TEST_F(CAbi, TheRootOfABroadcastNeedsNoOutput) {
  params.kind = FARANDOLE_BROADCAST;
  params.root = 0;
  farandole_operation* const broadcast = Prepare(params, "b");
  EXPECT_EQ(farandole_run(broadcast, 0, &in, &no_out, -1, &a_work), FARANDOLE_OK);
}

TEST(CAbiWithoutThreads, SaysThatNoThreadCanBeStarted) {
  for (int threads = 0; threads < 2; ++threads) {  // the watchdog's and the engine's
    threads_left = threads;
    farandole_context* context = nullptr;
    const int code = farandole_init_in_process(1, &context);
    threads_left = -1;
    EXPECT_EQ(code, FARANDOLE_RESOURCE_EXHAUSTED);
    EXPECT_EQ(context, nullptr);
    EXPECT_THAT(farandole_last_error(), HasSubstr("a thread cannot be started: Resource temp"));
  }
}

/// A store of this process, which notes whether another thread than that of a rank calls it.
class MapStore {
 public:
  explicit MapStore(std::chrono::milliseconds latency = {}) : latency_(latency) {}
  farandole_store For(std::thread::id caller) {
    const std::lock_guard lock(mutex_);
    users_.push_back({this, caller});
    return {&users_.back(), &Set, &Wait, &Get};
  }
  bool was_called_by_others() const { return was_called_by_others_; }
  size_t size() const { return values_.size(); }

 private:
  struct User {
    MapStore* store;
    std::thread::id caller;
  };
  static std::unique_lock<std::mutex> Enter(void* user) {
    const User& rank = *static_cast<User*>(user);
    std::unique_lock lock(rank.store->mutex_);
    if (rank.caller != std::this_thread::get_id()) rank.store->was_called_by_others_ = true;
    return lock;
  }
  static std::string& Value(void* user, const char* key) {
    return static_cast<User*>(user)->store->values_[key];
  }
  static int Set(void* user, const char* key, const void* value, size_t size) {
    const auto lock = Enter(user);
    Value(user, key) = std::string(static_cast<const char*>(value), size);
    return FARANDOLE_OK;
  }
  static int Wait(void* user, const char* key, double timeout_s) {
    EXPECT_LT(timeout_s, 1);
    const auto lock = Enter(user);
    return Value(user, key).empty() ? FARANDOLE_PENDING : FARANDOLE_OK;
  }
  static int Get(void* user, const char* key, void* value, size_t capacity, size_t* size) {
    const auto lock = Enter(user);
    std::this_thread::sleep_for(static_cast<User*>(user)->store->latency_);
    const std::string& found = Value(user, key);
    *size = found.size();
    found.copy(static_cast<char*>(value), capacity);
    return FARANDOLE_OK;
  }

  const std::chrono::milliseconds latency_;  // of Get
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::deque<User> users_;
  bool was_called_by_others_ = false;
};

void JoinTwoRanksBy(MapStore& store) {
  const auto body = [&](const farandole_store& mine, int rank) {
    farandole_init_options options = FARANDOLE_INIT_OPTIONS;
    options.rank = rank;
    options.size = 2;
    options.store = &mine;
    farandole_context* context = nullptr;
    int code = FARANDOLE_PENDING;
    while (code == FARANDOLE_PENDING) code = farandole_init_for(&options, 0.01, &context);
    ASSERT_EQ(code, FARANDOLE_OK) << farandole_last_error();
    farandole_topology topology;
    EXPECT_EQ(farandole_get_topology(context, &topology), FARANDOLE_OK);
    EXPECT_EQ(topology.rank, rank);
    EXPECT_EQ(topology.size, 2);
    EXPECT_EQ(farandole_shutdown(context), FARANDOLE_OK) << farandole_last_error();
    farandole_release(context);
  };
  std::thread other([&] { body(store.For(std::this_thread::get_id()), 1); });
  body(store.For(std::this_thread::get_id()), 0);
  other.join();
}

TEST(InitOptions, JoinRanksOverTcpByAStoreThatOnlyTheThreadInInitCalls) {
  MapStore store;
  JoinTwoRanksBy(store);
  EXPECT_GT(store.size(), 0u);
  EXPECT_FALSE(store.was_called_by_others());
}

TEST(InitOptions, JoinRanksByAStoreFarAway) {
  MapStore store(std::chrono::milliseconds(120));
  JoinTwoRanksBy(store);
}

TEST(InitOptions, SaysWhatIsWrongWithThem) {
  farandole_context* context = nullptr;
  farandole_init_options options = FARANDOLE_INIT_OPTIONS;
  options.struct_size = 8;
  EXPECT_EQ(farandole_init(&options, &context), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("farandole_init_options"));
  options = FARANDOLE_INIT_OPTIONS;
  options.rank = 0;
  options.size = 2;
  const farandole_store no_functions{};
  options.store = &no_functions;
  EXPECT_EQ(farandole_init(&options, &context), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("set, wait and get"));
  options.store = nullptr;
  options.address = "junk";
  EXPECT_EQ(farandole_init(&options, &context), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("\"junk\" is not host:port"));
  options.timeout_s = -1;
  EXPECT_EQ(farandole_init(&options, &context), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("timeout_s"));
  EXPECT_EQ(context, nullptr);
}

// Each allocation of this thread, by turns, from the first call to the last.
TEST(CAbiWithoutMemory, FailsAndThrowsNothing) {
  const int64_t count = 4;
  const farandole_tensor tensor = {nullptr, FARANDOLE_FLOAT32, 1, &count};
  farandole_params params{};
  params.struct_size = sizeof params;
  params.kind = FARANDOLE_ALLREDUCE;
  params.op = FARANDOLE_SUM;
  params.prescale = params.postscale = 1;
  params.root = -1;
  float data[4] = {};
  const void* in = data;
  void* out = data;
  farandole_context* context = nullptr;
  ASSERT_EQ(farandole_init_in_process(1, &context), FARANDOLE_OK);
  int failures = 0;
  bool is_reached = true;
  for (int64_t nth = 1; is_reached; ++nth) {
    const std::string name = "a tensor with a long name, number " + std::to_string(nth);
    farandole_operation* operation = nullptr;
    farandole_work* work = nullptr;
    const auto start = [&] {
      const int prepared =
          farandole_prepare(context, &params, name.c_str(), &tensor, 1, &operation, nullptr);
      if (prepared != FARANDOLE_OK) return prepared;
      return farandole_start(operation, 0, &in, &out, nullptr, nullptr, &work);
    };
    int code = FARANDOLE_OK;
    {
      const farandole::FailAllocation failure(nth);
      code = start();
      is_reached = failure.has_failed();
    }
    if (is_reached) {
      EXPECT_EQ(code, FARANDOLE_RESOURCE_EXHAUSTED) << "allocation " << nth;
      EXPECT_STREQ(farandole_last_error(), "out of memory");
      ++failures;
      code = start();  // what has failed holds nothing back
    }
    EXPECT_EQ(code, FARANDOLE_OK) << "allocation " << nth << ": " << farandole_last_error();
    EXPECT_EQ(farandole_wait(work, -1), FARANDOLE_OK) << farandole_last_error();
    farandole_work_release(work);
  }
  EXPECT_GT(failures, 3);
  farandole_release(context);
}

}  // namespace

// In place of the C library's, to run out of threads.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
  static const auto real =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_left.load() == 0) return EAGAIN;
  if (threads_left.load() > 0) --threads_left;
  return real(thread, attributes, body, argument);
}
