-- A project that uses an installed lockstep, header-only and compiled; not part of this one's build.
for name, package in pairs({consumer = "lockstep", compiled_consumer = "lockstep-compiled"}) do
    target(name)
        set_kind("binary")
        set_languages("c++20")
        add_files("main.cpp")
        add_cxflags("-O2", "-D_FORTIFY_SOURCE=2", {force = true})  -- what Ubuntu's g++ does unasked
        on_load(function (target)
            target:add(assert(find_package("pkgconfig::" .. package), package .. " is not installed"))
        end)
    target_end()
end
