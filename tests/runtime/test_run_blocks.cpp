// SPDX-License-Identifier: Apache-2.0
#include "fixtures.h"
#include "runtime/run_blocks.h"

namespace ikbo::runtime::testing {
namespace {

RunInputs inputs_of(const Request& request) {
  return {request.num_users, request.num_candidates, request.tensors};
}

// A block that holds no zero by chance.
std::vector<std::byte> dirty_block(const BlockLayout& layout) {
  return std::vector<std::byte>(layout.bytes, std::byte{0xA5});
}

// The elements of an input in a block, `rows` of them.
template <typename T>
std::vector<T> rows_at(const std::vector<std::byte>& block, const BlockLayout& layout,
                       std::size_t input, std::int64_t rows) {
  const std::size_t bytes = static_cast<std::size_t>(rows) * manifest().inputs[input].row_bytes();
  std::vector<T> values(bytes / sizeof(T));
  std::memcpy(values.data(), block.data() + layout.offsets[input], bytes);
  return values;
}

TEST(RunBlocks, LieAlignedBesideEachOther) {
  const Manifest of = manifest();
  const BlockLayout layout = layout_of(of.inputs, {4, 100});
  ASSERT_EQ(layout.offsets.size(), of.inputs.size());
  std::size_t end = 0;
  for (std::size_t i = 0; i < of.inputs.size(); ++i) {
    EXPECT_EQ(layout.offsets[i] % 256, 0U);
    EXPECT_GE(layout.offsets[i], end);
    const std::int64_t rows = num_rows(of.inputs[i].role, 4, 100);
    end = layout.offsets[i] + static_cast<std::size_t>(rows) * of.inputs[i].row_bytes();
  }
  EXPECT_GE(layout.bytes, end);
  EXPECT_EQ(layout_of(of.inputs, {0, 0}).bytes, 0U);
}

TEST(RunBlocks, HoldTheRunAndThenZerosAndTheLastUser) {
  const Manifest of = manifest();
  const RunSize size{4, 8};
  const BlockLayout layout = layout_of(of.inputs, size);
  const Request request = make_request(2, 5, 3);
  std::vector<std::byte> block = dirty_block(layout);
  write_padded(of.inputs, inputs_of(request), size, layout, block.data());

  auto age = values_of<std::int64_t>(request.tensors[kAge]);
  age.resize(4, 0);
  EXPECT_EQ(rows_at<std::int64_t>(block, layout, kAge, 4), age);
  auto history = values_of<float>(request.tensors[kHistory]);
  history.resize(12, 0.0F);
  EXPECT_EQ(rows_at<float>(block, layout, kHistory, 4), history);
  auto item = values_of<float>(request.tensors[kItem]);
  item.resize(16, 0.0F);
  EXPECT_EQ(rows_at<float>(block, layout, kItem, 8), item);
  auto index = values_of<std::int32_t>(request.tensors[kIndex]);
  index.resize(8, 3);
  EXPECT_EQ(rows_at<std::int32_t>(block, layout, kIndex, 8), index);
}

TEST(RunBlocks, HoldAnUnpaddedRunAsItIs) {
  const Manifest of = manifest();
  const RunSize size{3, 7};
  const BlockLayout layout = layout_of(of.inputs, size);
  const Request request = make_request(3, 7, 1);
  std::vector<std::byte> block = dirty_block(layout);
  write_padded(of.inputs, inputs_of(request), size, layout, block.data());
  EXPECT_EQ(rows_at<std::int32_t>(block, layout, kIndex, 7),
            values_of<std::int32_t>(request.tensors[kIndex]));
  EXPECT_EQ(rows_at<std::uint8_t>(block, layout, kIsNew, 7),
            values_of<std::uint8_t>(request.tensors[kIsNew]));
}

TEST(RunBlocks, PadWithAValueThatTheManifestAllows) {
  struct Case {
    ValueRange range;
    std::int64_t want;
  };
  for (const Case& allowed :
       {Case{{0, 9}, 0}, Case{{5, 9}, 5}, Case{{-9, -5}, -9}, Case{{-3, 3}, 0}}) {
    Manifest of = manifest();
    of.inputs[kAge].values = allowed.range;
    const BlockLayout layout = layout_of(of.inputs, {2, 1});
    std::vector<std::byte> block = dirty_block(layout);
    write_padded(of.inputs, {}, {2, 1}, layout, block.data());
    EXPECT_EQ(rows_at<std::int64_t>(block, layout, kAge, 2),
              (std::vector<std::int64_t>{allowed.want, allowed.want}));
  }
}

TEST(RunBlocks, SpreadMadeUpCandidatesOverTheUsers) {
  const Manifest of = manifest();
  const BlockLayout layout = layout_of(of.inputs, {3, 7});
  std::vector<std::byte> block = dirty_block(layout);
  write_made_up(of.inputs, {3, 7}, layout, block.data());
  EXPECT_EQ(rows_at<std::int32_t>(block, layout, kIndex, 7),
            (std::vector<std::int32_t>{0, 0, 0, 1, 1, 2, 2}));
}

TEST(RunBlocks, GiveBackTheRowsOfTheRunAlone) {
  const Manifest of = manifest();
  const BlockLayout layout = layout_of(of.outputs, {4, 16});
  std::vector<std::byte> block = dirty_block(layout);
  const std::vector<float> score = {1, 2, 3, 4, 5, 6};
  const std::vector<double> profile = {7, 8};
  std::memcpy(block.data() + layout.offsets[kScore], score.data(), score.size() * sizeof(float));
  std::memcpy(block.data() + layout.offsets[kProfile], profile.data(),
              profile.size() * sizeof(double));
  const std::vector<Tensor> rows = copy_rows(of.outputs, {1, 3}, layout, block.data());
  ASSERT_EQ(rows.size(), 2U);
  block.assign(block.size(), std::byte{0});  // the copies are the receiver's own
  EXPECT_EQ(rows[kScore].shape, (Shape{3, 2}));
  EXPECT_EQ(values_of<float>(rows[kScore]), score);
  EXPECT_EQ(rows[kProfile].shape, (Shape{1, 2}));
  EXPECT_EQ(values_of<double>(rows[kProfile]), profile);
}

}  // namespace
}  // namespace ikbo::runtime::testing
