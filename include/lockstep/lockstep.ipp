// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file All definitions that are no templates: compiled once into `lockstep::compiled`, or by
/// every program that includes the umbrella header-only.

#include "lockstep/checkpoint/checkpoint.ipp"
#include "lockstep/comm/comm.ipp"
#include "lockstep/core/core.ipp"
#include "lockstep/data/data.ipp"
#include "lockstep/device/device.ipp"
#include "lockstep/launch/launch.ipp"
#include "lockstep/launch/store.ipp"
#include "lockstep/norm/norm.ipp"
#include "lockstep/observe/observe.ipp"
#include "lockstep/strategy/strategy.ipp"
#include "lockstep/trainer/trainer.ipp"
